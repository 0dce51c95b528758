"""Runs the terms on groups and decides what a failure means."""

from __future__ import annotations

import logging
import threading
from math import isfinite

from grpo_cli.errors import ConfigError, Finding, RunError
from grpo_cli.reward.pool import Failure
from grpo_cli.reward.terms import Batched, InPlace, Outcome, PerCompletion, make_term
from grpo_cli.schema import Config
from grpo_cli.shaping import shape
from grpo_cli.stats import LARGEST
from grpo_cli.types import Group

logger = logging.getLogger(__name__)

COUNTS = {
    "timeout": "reward/timeout_count",
    "died": "reward/worker_death_count",
    "error": "reward/error_count",
}
"""Kind of failure -> the metric that counts its completions."""


class Scorer:
    """The reward terms of a run. Each rank has its own, which scores that rank's groups."""

    def __init__(self, cfg: Config):
        self._abort = cfg.reward.on_error == "abort"
        self._weights = cfg.reward.weights
        self._overlong = cfg.reward.overlong
        self._counts: dict[str, float] = {}
        self._warned: set[tuple[str, str]] = set()
        self._turn = threading.Lock()
        self._terms: dict[str, InPlace | PerCompletion | Batched] = {}
        assert len(self._weights) == len(cfg.reward.terms), "rule reward_term_names_unique"
        try:
            for term, name in zip(cfg.reward.terms, cfg.reward.term_names, strict=True):
                self._terms[name] = make_term(term, name, cfg)
        except (ValueError, OSError) as error:
            self.close()
            fix = "path, function and signature of the python terms in reward.terms"
            raise ConfigError(Finding("python_reward_callable", ("reward.terms",), str(error), fix)) from error

    def score(self, groups: list[Group]) -> list[Group]:
        """Fills `rewards`, `unshaped` and `reward` of every completion, in place; returns the same groups.

        Raises RunError naming term, step, prompt and completion when a term fails and the config does not forgive it.
        Threads take turns: an asynchronous run scores while it evaluates.
        """
        with self._turn:
            return self._score(groups)

    def _score(self, groups: list[Group]) -> list[Group]:
        for name, term in self._terms.items():
            for group, outcomes in zip(groups, term.score(groups), strict=True):
                for index, outcome in enumerate(outcomes):
                    group.completions[index].rewards[name] = self._value(name, group, index, outcome)
        for group in groups:
            for completion in group.completions:
                shape(completion, self._weights, self._overlong)
        return groups

    def metrics(self) -> dict[str, float]:
        """Completions that no term could score since the last call, by reason; all of this rank."""
        counts = {key: self._counts.get(key, 0.0) for key in COUNTS.values()}
        self._counts.clear()
        self._warned.clear()
        return counts

    def close(self) -> None:
        """Ends all worker processes; may be called twice."""
        for term in self._terms.values():
            term.close()

    def _value(self, name: str, group: Group, index: int, outcome: Outcome) -> float | None:
        if isinstance(outcome, Failure):
            self._failed(name, group, index, outcome)
            return None
        if outcome is not None and not abs(outcome) <= LARGEST:  # NaN is beyond everything
            beyond = f", beyond {LARGEST:g}" if isfinite(outcome) else ""
            self._failed(name, group, index, Failure("error", f"returned {outcome}{beyond}"))
            return None
        return outcome

    def _failed(self, name: str, group: Group, index: int, failure: Failure) -> None:
        prompt = group.prompt
        where = failure.where or f"prompt {prompt.prompt_id} ({prompt.source}), completion {index}"
        where += f", step {group.step}"
        if failure.kind == "contract":
            raise RunError(f"reward term {name} {failure.reason} ({where}).")
        if failure.kind == "error" and self._abort:
            hint = "reward.on_error=unscored would leave such completions out"
            raise RunError(f"reward term {name} failed on {where}: {failure.reason}. ({hint})")
        key = COUNTS[failure.kind]
        self._counts[key] = self._counts.get(key, 0.0) + 1
        if (name, key) not in self._warned:  # once a step: the count tells the rest
            self._warned.add((name, key))
            logger.warning("reward term %s could not score %s: %s", name, where, failure.reason)
