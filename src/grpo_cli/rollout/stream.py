"""Asynchronous rollouts: a task generates and scores ahead of the trainer, which takes groups in the order drawn.

At most `max_staleness` steps' worth of groups is under way or waiting, so that with policies replaced once a step none
is older than that when its turn comes (a step that stays empty can make one so; it is dropped as stale). Taking them in
the order drawn keeps long completions from being overtaken by short ones, and a step's prompts from depending on time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import ConfigError, GuardStop, RunError
from grpo_cli.metrics import group_metrics
from grpo_cli.process.signals import Interrupted
from grpo_cli.rollout.source import StepGroups, add_to
from grpo_cli.schema import Config
from grpo_cli.stats import mean
from grpo_cli.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks
    from grpo_cli.rollout.vllm_server import ServerRollout

_LINE_FACTOR = 4
"""How many times `max_staleness` steps' groups may stand in line when most of them were dropped."""


@dataclass(slots=True)
class Item:
    """A group that is done: whole, or, where it was dropped, only its ids and rewards."""

    group: Group
    lengths: list[int]
    """Tokens of each completion, whether they are still there or not."""


@dataclass(slots=True)
class Entry:
    """A prompt in line, in the order drawn, until the trainer takes it."""

    prompt: Prompt
    task: asyncio.Task[Item]

    @property
    def ready(self) -> bool:
        return self.task.done()

    @property
    def dropped(self) -> bool:
        """Whether it is known to hold nothing to train on."""
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return done and self.task.result().group.dropped is not None


class Producer:
    """Keeps `limit` groups under way or waiting. Everything here runs on one event loop."""

    def __init__(self, draw: Callable[[], Prompt | None], make: Callable[[Prompt], Awaitable[Item]], limit: int):
        """`draw` gives the next prompt (None: there is no more), `make` generates, scores and filters its group."""
        self._draw, self._make, self._limit = draw, make, limit
        self._line: deque[Entry] = deque()
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._active_s = 0.0
        self._active_since: float | None = None

    async def run(self) -> None:
        """Draw prompts until there are none left, or something fails."""
        try:
            while True:
                while not self._has_room():
                    await self._change()
                prompt = self._draw()
                if prompt is None:
                    return
                entry = Entry(prompt, asyncio.ensure_future(self._make(prompt)))
                entry.task.add_done_callback(self._done)
                self._line.append(entry)
                self._tell()
        except Exception as error:
            self._failure = error
        finally:
            self._ended = True
            self._tell()

    async def next(self) -> Item | None:
        """The first of the line, when it is done; None when nothing comes any more. Raises what producing it raised."""
        while not self._line:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            await self._change()
        item = await asyncio.shield(self._line[0].task)
        self._line.popleft()
        self._tell()
        return item

    def pending(self) -> list[Prompt]:
        """The prompts in line."""
        return [entry.prompt for entry in self._line]

    def counts(self) -> tuple[int, int]:
        """(groups under way, groups that wait to be taken)."""
        ready = sum(entry.ready for entry in self._line)
        return len(self._line) - ready, ready

    def active_s(self) -> float:
        """Seconds, since the last call, in which at least one group was under way."""
        self._account()
        total, self._active_s = self._active_s, 0.0
        return total

    def cancel(self) -> None:
        """Give up what is under way."""
        self._ended = True
        for entry in self._line:
            entry.task.cancel()

    def _has_room(self) -> bool:
        useful = sum(not entry.dropped for entry in self._line)
        return useful < self._limit and len(self._line) < _LINE_FACTOR * self._limit

    def _done(self, task: asyncio.Task[Item]) -> None:
        if not task.cancelled():
            task.exception()  # it is raised when its turn comes; asyncio need not complain at the end
        self._tell()

    def _tell(self) -> None:
        self._account()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _change(self) -> None:
        await self._changed.wait()

    def _account(self) -> None:
        now = time.perf_counter()
        if self._active_since is not None:
            self._active_s += now - self._active_since
        self._active_since = now if self.counts()[0] else None


class AsyncSource:
    """The `GroupSource` of asynchronous runs. Rank 0 generates and scores for all; the others receive its groups."""

    def __init__(self, cfg: Config, data: Any, rollout: ServerRollout, scorer: Any, filter_: Any, ranks: Ranks):
        self._cfg, self._data, self._ranks = cfg, data, ranks
        self._rollout, self._scorer, self._filter = rollout, scorer, filter_
        self._version = self._step = self._index = 0
        self._again: deque[Prompt] = deque()
        """Prompts that a resumed run had drawn already."""
        self._producer: Producer | None = None
        self._scoring = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")
        self._counts: dict[str, float] = {}
        self._tokens = 0
        self._since = time.perf_counter()

    # ------------------------------------------------------------------------------------------ the trainer's side

    def step(self, step: int) -> StepGroups | None:
        """See `GroupSource.step`: the next groups with signal, as many as a step has prompts."""
        told: StepGroups | BaseException | None = None
        if self._ranks.first:
            try:
                told = self._take(step)
            except (Interrupted, RunError, GuardStop, ConfigError) as error:  # the other ranks wait to hear of it
                told = error
            except BaseException as error:  # told as text: a foreign one may not pickle, and its stack never does
                told = RunError(f"The generating task failed.\n{''.join(traceback.format_exception(error))}")
        told = self._ranks.gather(told)[0]
        if isinstance(told, BaseException):
            raise told
        return told

    def spent(self) -> bool:
        """See `GroupSource.spent`: what is under way counts as waiting, since it may yet have a signal."""
        mine = self._rollout.client.wait(self._all_taken()) if self._ranks.first else None
        return self._ranks.gather(mine)[0]

    def sync(self, policy: Any, version: int) -> dict[str, float]:
        """See `Rollout.sync`; the first call also starts generation."""
        metrics = self._rollout.sync(policy, version)
        self._version = version
        if self._ranks.first and self._producer is None:
            self._rollout.client.wait(self._start())
        return metrics

    def state(self) -> dict[str, Any]:
        """Prompts under way or waiting count as drawn; a resumed run generates them again, first of all."""
        mine = None
        if self._ranks.first:
            mine = self._snapshot() if self._producer is None else self._rollout.client.wait(self._async_snapshot())
        return self._ranks.gather(mine)[0]

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        assert self._producer is None, "generation has begun"
        self._data.load_state(state["data"])
        self._filter.load_state(state["filter"])
        self._again = deque(self._data.prompt(prompt_id) for prompt_id in state["pending"])

    def close(self) -> None:
        """End generation, then rollout and scorer."""
        if self._producer is not None:
            with contextlib.suppress(Exception):
                self._rollout.client.submit(self._stop()).result(10.0)
            self._producer = None
        self._scoring.shutdown(wait=False, cancel_futures=True)
        self._rollout.close()
        self._scorer.close()

    def _take(self, step: int) -> StepGroups | None:
        """Rank 0: groups in the order drawn, until the step is full; as many drops as it has prompts leave it empty."""
        client, needed = self._rollout.client, self._cfg.trainer.prompts_per_step
        kept: list[Item] = []
        dropped: list[Item] = []
        started = time.perf_counter()
        client.wait(self._begin(step))
        producer = self._producer
        assert producer is not None, "sync comes before the first step"
        while len(kept) < needed and (kept or len(dropped) < needed):
            item = client.wait(producer.next(), leave=True)
            if item is None:
                break
            if item.group.dropped is None and self._version - item.group.policy_version > self._limit_of_age():
                item = strip(item, "stale")
            (kept if item.group.dropped is None else dropped).append(item)
        if not kept and not dropped:
            return None
        wait_s = time.perf_counter() - started
        metrics = step_metrics(kept, dropped, self._version, self._cfg) | self._rollout.metrics()
        metrics |= client.wait(self._measure(wait_s))
        return StepGroups([item.group for item in kept], [item.group for item in dropped], metrics)

    def _limit_of_age(self) -> int:
        return self._cfg.rollout.max_staleness

    # ------------------------------------------------------------------------------------------ on the event loop

    async def _start(self) -> None:
        self._step, self._index = self._version + 1, 0
        limit = self._cfg.rollout.max_staleness * self._cfg.trainer.prompts_per_step
        self._producer = Producer(self._draw, self._make, limit)
        self._running = asyncio.ensure_future(self._producer.run())

    async def _stop(self) -> None:
        assert self._producer is not None
        self._running.cancel()
        self._producer.cancel()

    async def _begin(self, step: int) -> None:
        """New groups are numbered by the step that the trainer is in."""
        if step != self._step:
            self._step, self._index = step, 0

    def _draw(self) -> Prompt | None:
        if self._again:
            return self._again.popleft()
        return next(iter(self._data.next(1)), None)

    async def _make(self, prompt: Prompt) -> Item:
        group_id = f"{self._step}-{self._index}"
        self._index += 1
        group = await self._rollout.generate_one(group_id, prompt, self._step, self._version)
        self._tokens += sum(len(completion.token_ids) for completion in group.completions)
        await asyncio.get_running_loop().run_in_executor(self._scoring, self._score, group)
        self._filter.split([group])
        item = Item(group, [len(completion.token_ids) for completion in group.completions])
        return item if group.dropped is None else strip(item, group.dropped)

    def _score(self, group: Group) -> None:
        self._scorer.score([group])
        add_to(self._counts, self._scorer.metrics())

    async def _measure(self, wait_s: float) -> dict[str, float]:
        """What happened since the trainer took the step before."""
        assert self._producer is not None
        now = time.perf_counter()
        under_way, waiting = self._producer.counts()
        active_s = self._producer.active_s()
        measured = {
            "rollout/inflight": float(under_way * self._cfg.rollout.num_generations),
            "rollout/queue_size": float(waiting),
            "rollout/wait_s": wait_s,
            "rollout/tokens_per_s": self._tokens / (now - self._since),
            **self._counts,
        }
        if active_s > 0:
            measured["rollout/overlap"] = min(1.0, max(0.0, 1.0 - wait_s / active_s))
        self._counts, self._tokens, self._since = {}, 0, now
        return measured

    async def _all_taken(self) -> bool:
        assert self._producer is not None, "sync comes before the first step"
        return self._data.spent and not self._producer.pending() and not self._again

    async def _async_snapshot(self) -> dict[str, Any]:
        return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        in_line = self._producer.pending() if self._producer is not None else []
        return {
            "data": self._data.state(),
            "filter": self._filter.state(),
            "pending": [prompt.prompt_id for prompt in [*in_line, *self._again]],
        }


def strip(item: Item, reason: Any) -> Item:
    """A dropped group as it reaches the trainer: ids and rewards, without text, tokens and logprobs."""
    group = item.group
    completions = [
        Completion("", [], c.finish_reason, rewards=c.rewards, unshaped=c.unshaped, reward=c.reward)
        for c in group.completions
    ]
    prompt = Prompt(group.prompt.prompt_id, "", [], None, source=group.prompt.source)
    return Item(Group(group.group_id, prompt, completions, group.step, group.policy_version, reason), item.lengths)


def step_metrics(kept: list[Item], dropped: list[Item], version: int, cfg: Config) -> dict[str, float]:
    """`group_metrics` of the groups that were taken, and how old those are that are trained on."""
    everything = [*kept, *dropped]
    kept_groups, dropped_groups = [item.group for item in kept], [item.group for item in dropped]
    metrics = group_metrics([item.group for item in everything], kept_groups, dropped_groups, cfg)
    lengths = [float(length) for item in everything for length in item.lengths]
    if lengths:
        metrics["completions/length_mean"], metrics["completions/length_max"] = mean(lengths), max(lengths)
    ages = [float(version - group.policy_version) for group in kept_groups]
    if ages:
        metrics["staleness/mean"], metrics["staleness/max"] = mean(ages), max(ages)
    return metrics
