"""Groups as JSON: the rollout dump that people and `grpo replay` read, and the exact form that a checkpoint carries."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from grpo_cli.types import Completion, Group, Prompt

_COMPLETION_KEYS = (
    "text",
    "token_ids",
    "finish_reason",
    "rewards",
    "reward",
    "advantage",
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "sampler_logprobs",
)


def to_dump(group: Group, step: int) -> dict[str, Any]:
    """One line of RUN_DIR/rollouts/step_N.jsonl: the form of design.md. `step` is the step that used the group."""
    return {
        "step": step,
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "prompt_token_ids": group.prompt.token_ids,
        "policy_version": group.policy_version,
        "dropped": group.dropped,
        "completions": [_completion_to_dump(completion) for completion in group.completions],
    }


def _completion_to_dump(completion: Completion) -> dict[str, Any]:
    dump = {key: getattr(completion, key) for key in _COMPLETION_KEYS}
    if completion.entropies is not None:
        dump["entropies"] = completion.entropies
    return dump


def to_state(group: Group) -> dict[str, Any]:
    """Everything of a scored group but its row, for a checkpoint: with `from_state` bit by bit the same.

    Only scoring reads a row, and its columns may hold what JSON has not: times, bytes, NaN.
    """
    return asdict(replace(group, prompt=replace(group.prompt, row={})))


def from_state(state: dict[str, Any]) -> Group:
    """The group that `to_state` was given, without the row of its prompt."""
    prompt = Prompt(**state["prompt"])
    completions = [Completion(**completion) for completion in state["completions"]]
    return Group(**{**state, "prompt": prompt, "completions": completions})
