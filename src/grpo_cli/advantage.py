"""Advantages: one number a completion from the rewards of its group. Plain Python floats, whole steps at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_cli.masks import has_baseline
from grpo_cli.schema import Advantage, Config, Overlong
from grpo_cli.shaping import overlong_penalty
from grpo_cli.stats import deviation, is_constant, mean
from grpo_cli.types import Completion, Group


@dataclass(frozen=True, slots=True)
class Step:
    """The scored completions of the kept groups of one step: what every estimator reads.

    >>> Step([[Completion("5", [53], "stop", reward=1.0)]], {"exact": 1.0}).rewards
    [[1.0]]
    """

    groups: list[list[Completion]]
    weights: Mapping[str, float]
    """Weight of each reward term, for the estimator that takes the terms one by one."""
    overlong: Overlong | None = None
    """The soft length penalty, which is one more term of weight 1 there."""

    @property
    def rewards(self) -> list[list[float]]:
        return [[completion.reward for completion in group if completion.reward is not None] for group in self.groups]


Estimator = Callable[[Step, Advantage], list[list[float]]]
"""Advantages of each group's scored completions, in their order."""


def assign(groups: list[Group], cfg: Config, weights: Mapping[str, float] | None = None) -> list[Group]:
    """Sets `completion.advantage` on the kept groups of a whole step, in place; 0.0 for unscored completions.

    Args:
        groups: the kept groups of the step, of all ranks.
        cfg: the whole config; `cfg.advantage` and the weights of `cfg.reward` are read.
        weights: weight of each reward term where it is not the config's (`grpo replay`).

    For the whitened estimators this is the value before whitening; `loss.prepare` whitens and clamps it.
    """
    weights = cfg.reward.weights if weights is None else weights
    step = Step([group.scored for group in groups], weights, cfg.reward.overlong)
    clip = math.inf if cfg.advantage.clip is None or cfg.whitens_advantage else cfg.advantage.clip
    estimates = ESTIMATORS[cfg.advantage.name](step, cfg.advantage)
    for group, scored, values in zip(groups, step.groups, estimates, strict=True):
        for completion in group.completions:
            completion.advantage = 0.0
        if not has_baseline(group, cfg):
            continue
        for completion, value in zip(scored, values, strict=True):
            completion.advantage = min(max(value, -clip), clip)
    return groups


def grpo(step: Step, settings: Advantage) -> list[list[float]]:
    """(r - baseline) / (std + eps), ddof 1 (DeepSeekMath, arXiv 2402.03300 section 4.1.2).

    `normalize` takes the deviation of the group, of the step, or none; `leave_one_out` takes the mean of the others.
    """
    centred = [_minus_others(rewards) if settings.leave_one_out else _minus_mean(rewards) for rewards in step.rewards]
    if settings.normalize == "none":
        return centred
    of_step = deviation([reward for rewards in step.rewards for reward in rewards])
    deviations = [of_step if settings.normalize == "batch" else deviation(rewards) for rewards in step.rewards]
    return [
        [value / (scale + settings.eps) for value in values] for values, scale in zip(centred, deviations, strict=True)
    ]


def dr_grpo(step: Step, settings: Advantage) -> list[list[float]]:
    """r - mean (arXiv 2503.20783)."""
    return [_minus_mean(rewards) for rewards in step.rewards]


def rloo(step: Step, settings: Advantage) -> list[list[float]]:
    """r - mean of the others (arXiv 2402.14740)."""
    return [_minus_others(rewards) for rewards in step.rewards]


def reinforce_pp(step: Step, settings: Advantage) -> list[list[float]]:
    """r itself; `loss.prepare` whitens it over the tokens of the step (arXiv 2501.03262)."""
    return step.rewards


def opo(step: Step, settings: Advantage) -> list[list[float]]:
    """r - the mean weighted by length in tokens, masked or not (arXiv 2505.23585); all empty: the plain mean."""
    return [
        _minus(rewards, _weighted_mean(rewards, [len(completion.token_ids) for completion in group]))
        for group, rewards in zip(step.groups, step.rewards, strict=True)
    ]


def passk(step: Step, settings: Advantage) -> list[list[float]]:
    """The single best gets (best - second) / (std + eps), the others 0; two bests: all 0 (arXiv 2503.19595)."""
    return [_passk_group(rewards, settings.eps) for rewards in step.rewards]


def _passk_group(rewards: list[float], eps: float) -> list[float]:
    values = [0.0] * len(rewards)
    if len(rewards) > 1:
        second, best = sorted(rewards)[-2:]
        values[rewards.index(best)] = (best - second) / (deviation(rewards) + eps)
    return values


def maxrl(step: Step, settings: Advantage) -> list[list[float]]:
    """(r - mean) / mean where the mean is positive, else 0; meant for rewards that are not negative."""
    return [_maxrl_group(rewards) for rewards in step.rewards]


def _maxrl_group(rewards: list[float]) -> list[float]:
    average = mean(rewards)
    return [value / average if average > 0 else 0.0 for value in _minus_mean(rewards)]


def gdpo(step: Step, settings: Advantage) -> list[list[float]]:
    """Each term z-scored in its group, weighted sum, then z-scored over the step (arXiv 2601.05242 section 3).

    A term that could not score a completion takes no part there; the overlong penalty counts as one more term.
    """
    sums = [_sum_of_scores(group, step, settings.eps) for group in step.groups]
    everyone = [value for values in sums for value in values]
    average, scale = mean(everyone), deviation(everyone) + settings.eps
    return [[0.0 if is_constant(values) else (value - average) / scale for value in values] for values in sums]


def _sum_of_scores(group: list[Completion], step: Step, eps: float) -> list[float]:
    """Weighted sum of the z-scores of each term, for each completion of a group."""
    columns = [
        (weight, [completion.rewards.get(name) for completion in group]) for name, weight in step.weights.items()
    ]
    columns.append((1.0, [overlong_penalty(len(completion.token_ids), step.overlong) for completion in group]))
    scores = [[weight * score for score in _scores(values, eps)] for weight, values in columns]
    return [math.fsum(column) for column in zip(*scores, strict=True)]


def _scores(values: list[float | None], eps: float) -> list[float]:
    """z-scores of the values that are there, 0 for the others and where all are equal."""
    known = [value for value in values if value is not None]
    if is_constant(known):
        return [0.0] * len(values)
    average, scale = mean(known), deviation(known) + eps
    return [0.0 if value is None else (value - average) / scale for value in values]


def _minus_mean(values: list[float]) -> list[float]:
    return _minus(values, mean(values))


def _minus_others(values: list[float]) -> list[float]:
    """Each value less the mean of the others: n/(n-1) times its distance from the mean of all."""
    return [value * len(values) / (len(values) - 1) for value in _minus_mean(values)] if len(values) > 1 else [0.0]


def _minus(values: list[float], baseline: float) -> list[float]:
    """Distances from a mean of the values; exactly 0 where they are all equal, however the mean was rounded."""
    return [0.0] * len(values) if is_constant(values) else [value - baseline for value in values]


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean weighted by `weights`; the plain one where they are all 0."""
    total = math.fsum(weights)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total if total else mean(values)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": dr_grpo,
    "gdpo": gdpo,
    "opo": opo,
    "passk": passk,
    "maxrl": maxrl,
}
