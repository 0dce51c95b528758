"""Where a step's groups come from: the only difference between synchronous and asynchronous runs.

How `worker.py` uses it, the same for both:

    source = make_source(cfg, data, rollout, scorer, filter_, ranks)
    source.load_state(state)                      # on resume; holds the data cursor and what was not trained yet
    source.sync(policy, policy.version)           # before the first step: the engine has the policy's weights, proved
    for step in range(start, steps):
        groups = source.step(step)                # None: the data are spent, the run is complete
        ... groups.kept, groups.dropped           # the same on every rank, in the order of their index
        ... update on groups.kept ...
        metrics |= source.sync(policy, policy.version)
        checkpoint: source.state()                # JSON-able, the same on every rank
    source.close()                                # also ends the rollout and the scorer

A dropped group of an asynchronous run is only an id with its rewards: tokens and text stay where it was dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from grpo_cli.process.signals import Interrupted
from grpo_cli.schema import Config
from grpo_cli.types import Group, Prompt

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks
    from grpo_cli.rollout import Rollout


@dataclass(slots=True)
class StepGroups:
    """What one step has to train on, and what fell away on the way."""

    kept: list[Group]
    dropped: list[Group]
    """Each with its reason in `dropped`; stale ones too."""
    metrics: dict[str, float] = field(default_factory=dict)


class Refill(Protocol):
    """One step's way to enough groups: `Filter.refill(needed, version)` makes it, carried groups inside."""

    def wanted(self) -> int:
        """Prompts that the next round generates; 0 when the step is full or its rounds are spent."""

    def add(self, groups: list[Group]) -> None:
        """The scored groups of a round; the filter splits them."""

    def result(self) -> tuple[list[Group], list[Group], dict[str, float]]:
        """(kept, dropped, metrics); every dropped group says why."""


class GroupSource(Protocol):
    """Groups for the loop. Every rank calls each method, in the same order."""

    def step(self, step: int) -> StepGroups | None:
        """Groups of this step, identical on every rank; None when no prompt is left."""

    def spent(self) -> bool:
        """Whether no step is left after this one: every prompt was given out, and nothing waits."""

    def sync(self, policy: Any, version: int) -> dict[str, float]:
        """`Rollout.sync` between two generations, or in the middle of one."""

    def state(self) -> dict[str, Any]:
        """What resuming needs: the data cursor, and groups or prompts that were drawn but not trained on."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""

    def close(self) -> None:
        """End generation, rollout and scorer; may be called twice."""


def make_source(cfg: Config, data: Any, rollout: Rollout, scorer: Any, filter_: Any, ranks: Ranks) -> GroupSource:
    """The synchronous source, or with `rollout.max_staleness` above 0 the asynchronous one."""
    if cfg.rollout.max_staleness == 0:
        return SyncSource(cfg, data, rollout, scorer, filter_, ranks)
    from grpo_cli.rollout.stream import AsyncSource
    from grpo_cli.rollout.vllm_server import ServerRollout

    assert isinstance(rollout, ServerRollout), "rules stale_rollouts_need_an_engine and ..._own_devices"
    return AsyncSource(cfg, data, rollout, scorer, filter_, ranks)


class SyncSource:
    """Generate, score, filter, in as many rounds as the filter asks for; nothing runs while the trainer trains."""

    def __init__(self, cfg: Config, data: Any, rollout: Rollout, scorer: Any, filter_: Any, ranks: Ranks):
        self._cfg, self._data, self._ranks = cfg, data, ranks
        self._rollout, self._scorer, self._filter = rollout, scorer, filter_
        self._version = 0

    def step(self, step: int) -> StepGroups | None:
        refill = self._filter.refill(self._cfg.trainer.prompts_per_step, self._version)
        clock = Clock()
        generated = tokens = 0
        counts: dict[str, float] = {}
        while wanted := refill.wanted():
            prompts = self._data.next(wanted)
            if not prompts:
                break
            numbered = [(f"{step}-{generated + index}", prompt) for index, prompt in enumerate(prompts)]
            generated += len(prompts)
            groups, measured = self._round(numbered, step, clock)
            tokens += sum(len(completion.token_ids) for group in groups for completion in group.completions)
            add_to(counts, measured)
            refill.add(groups)
        kept, dropped, metrics = refill.result()
        if not kept and not dropped and not generated:
            return None
        metrics = {**metrics, **counts, **self._slowest(clock)}
        if metrics.get("time/rollout"):
            metrics["rollout/tokens_per_s"] = tokens / metrics["time/rollout"]
        return StepGroups(kept, dropped, metrics)

    def _round(
        self, numbered: list[tuple[str, Prompt]], step: int, clock: Clock
    ) -> tuple[list[Group], dict[str, float]]:
        """This rank's share of a round, generated and scored, then everybody's, in the order of `numbered`.

        Raises Interrupted on all ranks where a signal reached one of them in the middle of it.
        """
        mine = numbered[self._ranks.rank :: self._ranks.world]
        groups: list[Group] | None
        try:
            with clock.measure("time/rollout"):
                groups = self._rollout.generate(mine, step, self._version)
            with clock.measure("time/reward"):
                groups = self._scorer.score(groups)
        except Interrupted:
            groups = None
        gathered = self._ranks.gather((groups, self._scorer.metrics()))
        shares = [(share, measured) for share, measured in gathered if share is not None]
        if len(shares) < len(gathered):
            raise Interrupted
        by_id = {group.group_id: group for share, _ in shares for group in share}
        counts: dict[str, float] = {}
        for _, measured in shares:
            add_to(counts, measured)
        return [by_id[group_id] for group_id, _ in numbered], counts

    def _slowest(self, clock: Clock) -> dict[str, float]:
        """Times and engine measures of the slowest rank: the others wait for it."""
        slowest: dict[str, float] = {}
        for measured in self._ranks.gather({**self._rollout.metrics(), **clock.seconds}):
            for key, value in measured.items():
                slowest[key] = max(value, slowest.get(key, value))
        return slowest

    def spent(self) -> bool:
        return self._data.spent and not self._filter.carries

    def sync(self, policy: Any, version: int) -> dict[str, float]:
        self._version = version
        return self._rollout.sync(policy, version)

    def state(self) -> dict[str, Any]:
        return {"data": self._data.state(), "filter": self._filter.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._data.load_state(state["data"])
        self._filter.load_state(state["filter"])

    def close(self) -> None:
        self._rollout.close()
        self._scorer.close()


class Clock:
    """Seconds by name, added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            add_to(self.seconds, {name: time.perf_counter() - started})


def add_to(total: dict[str, float], more: dict[str, float]) -> None:
    """Adds `more` to `total` key by key."""
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value
