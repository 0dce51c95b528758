"""From the values of reward terms to one reward a completion: weighted sum, then the soft overlong penalty."""

from __future__ import annotations

import math
from collections.abc import Mapping

from grpo_cli.schema import Overlong
from grpo_cli.types import Completion


def shape(completion: Completion, weights: Mapping[str, float], overlong: Overlong | None) -> None:
    """Sets `unshaped` and `reward` of a completion from its `rewards`; both None where no term could score it.

    >>> completion = Completion("5", [53], "stop", rewards={"exact": 1.0, "format": None})
    >>> shape(completion, {"exact": 2.0, "format": 0.5}, None)
    >>> completion.unshaped, completion.reward
    (2.0, 2.0)
    """
    completion.unshaped = weighted_sum(completion.rewards, weights)
    completion.reward = completion.unshaped
    if completion.unshaped is not None:
        completion.reward = completion.unshaped + overlong_penalty(len(completion.token_ids), overlong)


def weighted_sum(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Sum of weight x value; a None term is left out, None when every term is. Exactly rounded: order is no matter."""
    parts = [weights[name] * value for name, value in rewards.items() if value is not None]
    return math.fsum(parts) if parts else None


def overlong_penalty(length: int, overlong: Overlong | None) -> float:
    """DAPO's soft penalty of a completion of `length` tokens (arXiv 2503.14476 Eq. 13).

    With M = max_tokens and B = buffer_tokens: 0 up to M - B, then a straight ramp, -penalty from M on.
    """
    if overlong is None:
        return 0.0
    excess = length - (overlong.max_tokens - overlong.buffer_tokens)
    return -overlong.penalty * min(max(excess / overlong.buffer_tokens, 0.0), 1.0)
