"""What a step's groups say about themselves: rewards, drops, lengths. A quantity that was not measured has no key."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_cli.masks import has_trained_token
from grpo_cli.schema import Config
from grpo_cli.stats import deviation, is_constant, mean
from grpo_cli.types import Completion, Group

DROPPED = ("unscored", "zero_std", "reward_range")
"""Reasons of the filter itself; stale and surplus groups had a signal and are counted apart."""


def group_metrics(groups: list[Group], kept: list[Group], dropped: list[Group], cfg: Config) -> dict[str, float]:
    """Metrics of one step.

    Args:
        groups: all groups generated in this step, of all ranks, dropped ones included.
        kept: the groups that were not dropped, also those carried over from an earlier step.
        dropped: the others, each with its reason, stale ones included.
        cfg: says which completions of a kept group are trained.
    """
    trained_on = [group for group in kept if has_trained_token(group, cfg)]
    scored = [completion for group in groups for completion in group.scored]
    rewards = [_reward(completion) for completion in scored]
    by_filter = [group for group in dropped if group.dropped in DROPPED]
    measured = {
        "reward": mean(rewards) if rewards else None,
        "reward_std": deviation(rewards) if len(rewards) > 1 else None,
        "reward_std_within_group": _mean_or_none(
            deviation(_rewards(group)) for group in groups if len(group.scored) > 1
        ),
        "reward_kept": _mean_or_none(reward for group in trained_on for reward in _rewards(group)),
        "frac_reward_zero_std": _mean_or_none(float(not has_signal(group)) for group in groups),
        "groups/trained_count": float(len(trained_on)),
        "groups/dropped_count": float(len(by_filter)),
        "groups/dropped_reward_mean": _mean_or_none(reward for group in by_filter for reward in _rewards(group)),
        "groups/unscored_count": float(sum(len(group.scored) < 2 for group in groups)),
        "groups/stale_count": float(sum(group.dropped == "stale" for group in dropped)),
        **_term_metrics(scored),
        **_completion_metrics([completion for group in groups for completion in group.completions]),
    }
    return {key: value for key, value in measured.items() if value is not None}


def has_signal(group: Group) -> bool:
    """Whether at least two completions were scored and their rewards differ; whatever the filter decides on."""
    return len(group.scored) > 1 and not is_constant(_rewards(group))


def _term_metrics(scored: list[Completion]) -> dict[str, float | None]:
    names = {name: None for completion in scored for name in completion.rewards}
    metrics: dict[str, float | None] = {}
    for name in names:
        values = [value for completion in scored if (value := completion.rewards.get(name)) is not None]
        metrics[f"rewards/{name}/mean"] = mean(values) if values else None
        metrics[f"rewards/{name}/std"] = deviation(values) if len(values) > 1 else None
    return metrics


def _completion_metrics(completions: list[Completion]) -> dict[str, float | None]:
    lengths = [float(len(completion.token_ids)) for completion in completions]
    return {
        "completions/unscored_count": float(sum(not completion.scored for completion in completions)),
        "completions/length_mean": mean(lengths) if lengths else None,
        "completions/length_max": max(lengths) if lengths else None,
        "completions/truncated_frac": _mean_or_none(float(c.finish_reason == "length") for c in completions),
    }


def _rewards(group: Group) -> list[float]:
    return [_reward(completion) for completion in group.scored]


def _reward(completion: Completion) -> float:
    assert completion.reward is not None, "a scored completion has a reward"
    return completion.reward


def _mean_or_none(values: Iterable[float]) -> float | None:
    values = list(values)
    return mean(values) if values else None
