"""Rewards: every completion gets the value of every term, or None where a term could not score it.

A grader that fails is never a wrong answer. What a term cannot score is None; an exception, or a value that is not
finite or beyond 1e60, ends the run (`reward.on_error=abort`) or is None and counted (`unscored`); a time-out is None
and counted, always; a function that returns the wrong number or type of values has broken its contract, which ends the
run, always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_cli.reward.scorer import Scorer
    from grpo_cli.schema import Config


def make_scorer(cfg: Config) -> Scorer:
    """The scorer of a config; its worker processes start in the background. ConfigError for a bad python term."""
    from grpo_cli.reward.scorer import Scorer  # here: every worker imports this package, and needs none of that

    return Scorer(cfg)
