"""Typed configs and small groups for tests."""

from __future__ import annotations

from functools import cache

from grpo_cli.compose import compose
from grpo_cli.schema import Config, parse
from grpo_cli.shaping import shape
from grpo_cli.types import Completion, Group, Prompt


@cache
def make_config(*overrides: str) -> Config:
    """The default config with overrides; asserts that it composes."""
    composed = compose(list(overrides))
    assert not composed.findings, composed.findings
    return parse(composed.config)


def make_group(
    *rewards: float | dict | None, lengths: list[int] | None = None, group_id: str = "1-0", version: int = 1
) -> Group:
    """A group whose completions have these rewards (of the term `number`, or of the named terms), weight 1 each."""
    completions = []
    for index, reward in enumerate(rewards):
        length = 2 if lengths is None else lengths[index]
        terms = reward if isinstance(reward, dict) else {"number": reward}
        completion = Completion("", list(range(length)), "stop", rewards=terms)
        shape(completion, dict.fromkeys(terms, 1.0), None)
        completions.append(completion)
    return Group(group_id, Prompt(f"row-{group_id}", "", [1], "0"), completions, step=1, policy_version=version)
