"""What flows through the loop: prompts, and groups of completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
DropReason = Literal["unscored", "zero_std", "reward_range", "stale", "surplus"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, templated and tokenised exactly once.

    >>> Prompt("row-57", "What is 2 + 3?", [1, 42, 7], "5", {"question": "What is 2 + 3?", "answer": "5"})
    """

    prompt_id: str
    text: str
    """The text after the chat template: what `token_ids` spell."""
    token_ids: list[int]
    answer: str | None
    """Gold answer as text; None where the data have none."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row, for reward functions that ask for them by name."""
    source: str = ""
    """`file:line` of the row, for error messages."""


@dataclass(slots=True)
class Completion:
    """One sampled answer. Every logprob list has the length of `token_ids`, or is None: not computed."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Value of each reward term, unweighted; None = that term could not score it."""
    unshaped: float | None = None
    """Weighted sum of the terms; None = unscored."""
    reward: float | None = None
    """`unshaped` plus the overlong penalty: what the advantage is made of."""
    advantage: float | None = None
    logprobs: list[float] | None = None
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    sampler_logprobs: list[float] | None = None
    entropies: list[float] | None = None

    @property
    def scored(self) -> bool:
        return self.reward is not None

    def metric(self, name: str) -> float | None:
        """The value that `filter.metric` = `name` decides on: `unshaped`, `total`, or one term's."""
        if name == "unshaped":
            return self.unshaped
        if name == "total":
            return self.reward
        return self.rewards.get(name)


@dataclass(slots=True)
class Group:
    """The completions of one prompt in one step; stages pass lists of these, never parallel lists."""

    group_id: str
    """`STEP-INDEX` of the step that generated it, unique in a run, for example `12-3`."""
    prompt: Prompt
    completions: list[Completion]
    step: int
    policy_version: int
    """Number of weight syncs that the sampling policy had seen."""
    dropped: DropReason | None = None

    @property
    def scored(self) -> list[Completion]:
        return [completion for completion in self.completions if completion.scored]
