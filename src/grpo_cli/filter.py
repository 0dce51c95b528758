"""Which groups are trained on: drop what carries no signal, generate more where asked, stop when nothing is left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from grpo_cli.errors import GuardStop
from grpo_cli.files.groupjson import from_state, to_state
from grpo_cli.metrics import group_metrics
from grpo_cli.schema import Config
from grpo_cli.schema import Filter as Settings
from grpo_cli.stats import is_constant, mean
from grpo_cli.types import DropReason, Group

Rule = Callable[[Group, Settings], DropReason | None]


def unscored(group: Group, settings: Settings) -> DropReason | None:
    """Fewer than two completions could be scored: nothing to compare."""
    return "unscored" if len(group.scored) < 2 else None


def zero_std(group: Group, settings: Settings) -> DropReason | None:
    """All scored values of `filter.metric` are equal (max == min, never a deviation against 0)."""
    return "zero_std" if is_constant(_values(group, settings)) else None


def reward_range(group: Group, settings: Settings) -> DropReason | None:
    """The group's mean of `filter.metric` lies outside [low, high]; a null bound is none."""
    values = _values(group, settings)
    low = -math.inf if settings.low is None else settings.low
    high = math.inf if settings.high is None else settings.high
    return None if low <= mean(values) <= high else "reward_range"


FILTERS: dict[str, tuple[Rule, ...]] = {
    "none": (),
    "zero_std": (unscored, zero_std),
    "dynamic_sampling": (unscored, zero_std),
    "reward_range": (unscored, zero_std, reward_range),
}
"""The rules of each filter; the first that applies gives the reason."""


def make_filter(cfg: Config) -> Filter:
    """The filter that the config asks for."""
    return Filter(cfg)


class Filter:
    """Splits groups into kept and dropped, carries surplus from step to step, and counts empty steps.

    One step of the loop:

        refill = filter_.refill(needed, version)      # carried groups are in it already
        while wanted := refill.wanted():
            refill.add(score(generate(data.next(wanted))))
        kept, dropped, metrics = refill.result()
        ...
        filter_.end_step(kept, dropped, trained=...)  # after logging: may end the run
    """

    def __init__(self, cfg: Config):
        self.cfg, self.settings = cfg, cfg.filter
        self._rules = FILTERS[cfg.filter.name]
        self._needed = cfg.trainer.prompts_per_step
        self._carried: list[Group] = []
        self._empty_steps = 0
        self._rounds = 0

    @property
    def resamples(self) -> bool:
        """Whether a step may generate more than once, so that steps and prompts are not proportional."""
        return self.settings.max_rounds is not None

    @property
    def carries(self) -> bool:
        """Whether groups wait for the next step."""
        return bool(self._carried)

    def split(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """Kept and dropped groups, both in the order of `groups`; sets `group.dropped` on every one."""
        for group in groups:
            reasons = (rule(group, self.settings) for rule in self._rules)
            group.dropped = next((reason for reason in reasons if reason is not None), None)
        kept = [group for group in groups if group.dropped is None]
        return kept, [group for group in groups if group.dropped is not None]

    def refill(self, needed: int, version: int) -> Refill:
        """A step that wants `needed` groups, with the carried ones that are at most one policy version old."""
        carried, self._carried = self._carried, []
        return Refill(self, needed, version, carried)

    def settle(self, surplus: list[Group], rounds: int) -> list[Group]:
        """Carry the surplus of a step or discard it, as asked; returns the discarded groups, marked as such."""
        self._rounds = rounds
        if self.settings.surplus == "carry":
            self._carried = surplus
            return []
        for group in surplus:
            group.dropped = "surplus"
        return surplus

    def end_step(self, kept: list[Group], dropped: list[Group], trained: bool) -> None:
        """Count empty steps; every rank calls it with the same groups, after the step is logged.

        Args:
            kept: groups of the step that were not dropped.
            dropped: the others.
            trained: whether any token of them was trained.

        Raises GuardStop at the `filter.max_empty_steps`-th step in a row without a trained token.
        """
        self._empty_steps = 0 if trained else self._empty_steps + 1
        limit = self.settings.max_empty_steps
        if limit is not None and self._empty_steps >= limit:
            raise GuardStop(self._explain(kept, dropped))

    def _explain(self, kept: list[Group], dropped: list[Group]) -> str:
        reasons = Counter(group.dropped for group in dropped)
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=str)) or "none"
        after = f" after {self._rounds} round{'s' * (self._rounds != 1)} of generation" if self._rounds else ""
        why = (
            "Every token of the kept groups was masked: look at loss.mask_truncated, rollout.max_new_tokens and "
            "loss.seq_logprob_error_threshold."
            if kept
            else ADVICE.get(reasons.most_common(1)[0][0] if reasons else None, "No groups were generated.")
        )
        return (
            f"Nothing to train on for {self._empty_steps} steps in a row (filter.max_empty_steps="
            f"{self.settings.max_empty_steps}). In the last one {len(kept)} of {self._needed} needed groups were kept"
            f"{after}; dropped: {told}. {why}"
        )

    def state(self) -> dict[str, Any]:
        """What resuming needs, as JSON values: carried groups with all they hold, and the empty steps in a row."""
        return {"carried": [to_state(group) for group in self._carried], "empty_steps": self._empty_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._carried = [from_state(group) for group in state["carried"]]
        self._empty_steps = state["empty_steps"]


ADVICE: dict[str | None, str] = {
    "zero_std": "All completions of a prompt score the same: the task is too easy or too hard for this model, or "
    "sampling does not explore. Look at the dumped rollouts, raise rollout.temperature or rollout.num_generations, "
    "or change the data or reward.terms.",
    "unscored": "Completions could not be scored: look at the reward errors and time-outs in the log.",
    "reward_range": "Group means lie outside filter.low and filter.high: widen them.",
    "stale": "Groups were older than one policy version when their turn came: use filter.surplus=discard, or lower "
    "rollout.max_staleness.",
}


class Refill:
    """One step's way to enough groups: rounds of `needed` prompts until enough are kept or the rounds are spent.

    Only dynamic_sampling has more than one round (`filter.max_rounds`). A round is always whole, as in DAPO, so there
    can be a surplus.
    """

    def __init__(self, owner: Filter, needed: int, version: int, carried: list[Group]):
        self._owner, self._needed, self._rounds = owner, needed, 0
        self._max_rounds = owner.settings.max_rounds or 1
        self._kept = [group for group in carried if group.policy_version >= version - 1]
        self._dropped = [group for group in carried if group.policy_version < version - 1]
        self._generated: list[Group] = []
        for group in self._dropped:
            group.dropped = "stale"

    def wanted(self) -> int:
        """Prompts that the next round generates; 0 when the step is full or its rounds are spent."""
        full = len(self._kept) >= self._needed
        return 0 if full or self._rounds >= self._max_rounds else self._needed

    def add(self, groups: list[Group]) -> None:
        """Filter the scored groups of a round."""
        kept, dropped = self._owner.split(groups)
        self._kept += kept
        self._dropped += dropped
        self._generated += groups
        self._rounds += 1

    def result(self) -> tuple[list[Group], list[Group], dict[str, float]]:
        """(kept, dropped, metrics): at most `needed` kept ones, oldest first; every dropped group says why.

        The metrics are those of `group_metrics`, and what became of rounds and surplus. Call it once.
        """
        kept, surplus = self._kept[: self._needed], self._kept[self._needed :]
        dropped = self._dropped + self._owner.settle(surplus, self._rounds)
        metrics = group_metrics(self._generated, kept, dropped, self._owner.cfg)
        if self._owner.settings.name == "dynamic_sampling":
            metrics["groups/rounds_count"] = float(self._rounds)
            metrics["groups/carried_count"] = float(sum(group.dropped is None for group in surplus))
            metrics["groups/discarded_count"] = float(sum(group.dropped == "surplus" for group in surplus))
        return kept, dropped, metrics


def _values(group: Group, settings: Settings) -> list[float]:
    """The values of `filter.metric` over the scored completions that have one."""
    values = (completion.metric(settings.metric) for completion in group.scored)
    return [value for value in values if value is not None]
