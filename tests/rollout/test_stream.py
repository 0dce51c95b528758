"""The asynchronous source without an engine: a scripted rollout on a real event loop."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from datetime import datetime
from types import SimpleNamespace

import pytest

from grpo_cli.errors import RunError
from grpo_cli.filter import make_filter
from grpo_cli.rollout.stream import AsyncSource
from grpo_cli.types import Completion, Group, Prompt
from tests.configs import make_config

P = 2


class OneRank:
    rank, world, first = 0, 1, True

    def gather(self, value):
        """Pickled, as between processes: the stack of an exception is not."""
        return [pickle.loads(pickle.dumps(value))]


class Data:
    """Prompts p0, p1, ... up to `size`."""

    def __init__(self, size: int):
        self.size, self.cursor = size, 0

    @property
    def spent(self):
        return self.cursor >= self.size

    def next(self, count):
        stop = min(self.cursor + count, self.size)
        prompts = [Prompt(f"p{index}", "text", [index], None) for index in range(self.cursor, stop)]
        self.cursor = stop
        return prompts

    def prompt(self, prompt_id):
        return Prompt(prompt_id, "text", [int(prompt_id[1:])], None)

    def state(self):
        return {"cursor": self.cursor}

    def load_state(self, state):
        self.cursor = state["cursor"]


class Client:
    """An event loop in a thread, as the real client has it."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def submit(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work, leave=False):
        return self.submit(work).result(20.0)


class ForeignError(Exception):
    """Cannot be unpickled, as httpx's errors cannot: it is not made from its message."""

    def __init__(self, *, code, reason):
        super().__init__(f"{reason} ({code})")


class Rollout:
    """Answers with two completions; the prompt's number says how long it takes and what they are worth."""

    def __init__(self, delays=None, fail_at=None):
        self.client = Client()
        self.delays, self.fail_at = delays or {}, fail_at
        self.begun: list[tuple[str, str, int]] = []
        self.closed = False

    async def generate_one(self, group_id, prompt, step, version):
        self.begun.append((group_id, prompt.prompt_id, version))
        await asyncio.sleep(self.delays.get(prompt.prompt_id, 0.0))
        if prompt.prompt_id == self.fail_at:
            raise ForeignError(code=7, reason="a bug in the generating task")
        completions = [Completion("text", [1, 2], "stop"), Completion("text", [1, 2, 3], "length")]
        return Group(group_id, prompt, completions, step, version)

    def sync(self, policy, version):
        return {"time/weight_sync": 0.0}

    def metrics(self):
        return {"rollout/vllm_queued_requests": 1.0}

    def close(self):
        self.client.loop.call_soon_threadsafe(self.client.loop.stop)
        self.closed = True


class Scorer:
    """Different rewards in a group, except for the prompts in `equal`."""

    def __init__(self, equal=()):
        self.equal = equal

    def score(self, groups):
        for group in groups:
            for index, completion in enumerate(group.completions):
                reward = 1.0 if group.prompt.prompt_id in self.equal else float(index)
                completion.rewards, completion.unshaped, completion.reward = {"number": reward}, reward, reward
        return groups

    def metrics(self):
        return {"reward/timeout_count": 1.0}

    def close(self):
        pass


def source_of(rollout, data=None, scorer=None, staleness=1):
    cfg = make_config(
        "rollout=vllm_server",
        f"rollout.max_staleness={staleness}",
        f"trainer.prompts_per_step={P}",
        "rollout.num_generations=2",
    )
    return AsyncSource(cfg, data or Data(100), rollout, scorer or Scorer(), make_filter(cfg), OneRank())


def ids(groups):
    return [group.prompt.prompt_id for group in groups]


def settle(rollout, begun: int) -> None:
    """Wait until so many groups were begun, then a little for one too many."""
    deadline = time.monotonic() + 10
    while len(rollout.begun) < begun and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(rollout.begun) == begun


def test_generation_runs_ahead_by_the_staleness_and_no_further():
    rollout = Rollout()
    source = source_of(rollout, staleness=2)
    source.sync(None, 0)
    settle(rollout, 2 * P)
    first = source.step(1)
    assert ids(first.kept) == ["p0", "p1"]
    settle(rollout, 3 * P)  # what was taken makes room
    for step in (2, 3, 4):
        source.sync(None, step - 1)
        groups = source.step(step)
        assert all(step - 1 - group.policy_version <= 2 for group in groups.kept)
        settle(rollout, (step + 2) * P)
    assert groups.metrics["staleness/max"] == 2.0
    source.close()
    assert rollout.closed


def test_every_completion_carries_the_version_it_began_with():
    rollout = Rollout()
    source = source_of(rollout)
    source.sync(None, 5)
    source.step(6)
    settle(rollout, 2 * P)
    source.sync(None, 6)
    groups = source.step(7)
    assert [group.policy_version for group in groups.kept] == [5, 5]  # begun before the update
    assert groups.metrics["staleness/mean"] == 1.0
    assert [begun[0] for begun in rollout.begun[: 2 * P]] == ["6-0", "6-1", "6-2", "6-3"]
    source.close()


def test_groups_come_in_the_order_drawn_however_long_they_took():
    rollout = Rollout(delays={"p0": 0.3})
    source = source_of(rollout)
    source.sync(None, 0)
    assert ids(source.step(1).kept) == ["p0", "p1"]
    source.close()


def test_dropped_groups_are_replaced_and_reach_the_trainer_as_ids():
    rollout, data = Rollout(), Data(100)
    source = source_of(rollout, data, Scorer(equal={"p0", "p2"}))
    source.sync(None, 0)
    groups = source.step(1)
    # p0 falls away before anything is kept; p1 stays; p2 falls away; p3 fills the step.
    assert ids(groups.kept) == ["p1", "p3"]
    assert ids(groups.dropped) == ["p0", "p2"]
    for group in groups.dropped:
        assert group.dropped == "zero_std"
        assert group.prompt.text == ""
        assert [(c.text, c.token_ids, c.sampler_logprobs) for c in group.completions] == [("", [], None)] * 2
        assert [c.reward for c in group.completions] == [1.0, 1.0]
    metrics = groups.metrics
    assert metrics["groups/dropped_count"] == 2.0
    assert metrics["frac_reward_zero_std"] == 0.5
    # Two kept groups with rewards 0 and 1, two dropped ones with 1 and 1.
    assert metrics["reward"] == 0.75
    assert metrics["completions/length_mean"] == 2.5  # of all four groups: 2 and 3 tokens each
    source.close()


def test_as_many_drops_as_a_step_has_prompts_leave_it_empty():
    source = source_of(Rollout(), scorer=Scorer(equal={f"p{i}" for i in range(100)}))
    source.sync(None, 0)
    groups = source.step(1)
    assert groups.kept == []
    assert ids(groups.dropped) == ["p0", "p1"]
    source.close()


def test_groups_that_became_too_old_are_counted_and_consumed():
    source = source_of(Rollout())
    source.sync(None, 0)
    settle(source._rollout, P)
    source.sync(None, 1)
    source.sync(None, 2)  # twice without a step: what was begun at version 0 is two versions old now
    groups = source.step(3)
    assert [(group.prompt.prompt_id, group.dropped) for group in groups.dropped] == [("p0", "stale"), ("p1", "stale")]
    assert groups.metrics["groups/stale_count"] == 2.0
    assert groups.kept == []
    source.close()


def test_the_state_holds_what_was_drawn_and_not_trained_on():
    rollout, data = Rollout(), Data(100)
    source = source_of(rollout, data)
    source.sync(None, 0)
    source.step(1)
    settle(rollout, 2 * P)
    state = source.state()
    assert state["data"] == {"cursor": 4}
    assert state["pending"] == ["p2", "p3"]
    source.close()

    resumed = source_of(Rollout(), Data(100))
    resumed.load_state(state)
    assert resumed.state() == state  # also before generation has begun
    resumed.sync(None, 1)
    assert ids(resumed.step(2).kept) == ["p2", "p3"]
    assert ids(resumed.step(3).kept) == ["p4", "p5"]
    resumed.close()


def test_the_tail_of_the_data_is_used_and_then_the_source_ends():
    source = source_of(Rollout(), Data(3))
    source.sync(None, 0)
    assert ids(source.step(1).kept) == ["p0", "p1"]
    assert not source.spent()
    assert ids(source.step(2).kept) == ["p2"]
    assert source.spent()
    assert source.step(3) is None
    source.close()


def test_a_producer_that_dies_ends_the_step_with_its_traceback():
    source = source_of(Rollout(fail_at="p1"))
    source.sync(None, 0)
    with pytest.raises(RunError, match=r"(?s)generating task failed.*generate_one.*a bug in the generating task"):
        source.step(1)
    source.close()


def test_data_that_fail_end_the_step_with_their_traceback():
    broken = SimpleNamespace(next=lambda count: 1 / 0, state=dict)
    source = source_of(Rollout(), broken)
    source.sync(None, 0)
    with pytest.raises(RunError, match=r"(?s)generating task failed.*division by zero"):
        source.step(1)
    source.close()


def test_measures():
    rollout = Rollout(delays={f"p{i}": 0.2 for i in range(100)})
    source = source_of(rollout)
    source.sync(None, 0)
    source.step(1)
    time.sleep(0.5)  # training, while the next groups are generated
    metrics = source.step(2).metrics
    assert metrics["rollout/wait_s"] < 0.15
    assert metrics["rollout/overlap"] > 0.3  # 0.2 s of generation, hardly any of it waited for
    assert metrics["rollout/vllm_queued_requests"] == 1.0
    assert metrics["rollout/tokens_per_s"] > 0
    assert metrics["rollout/inflight"] + 2 * metrics["rollout/queue_size"] <= 2 * P
    assert metrics["reward/timeout_count"] >= 2.0  # one a scored group
    source.close()


def test_rows_that_json_cannot_hold_stay_out_of_the_state():
    prompt = Prompt("row-1", "text", [1, 2], "3", {"at": datetime(2024, 1, 1), "raw": b"\xff"}, "file:1")
    data = SimpleNamespace(next=lambda count: [prompt], state=dict)
    source = source_of(Rollout(delays={"row-1": 5.0}), data)
    source.sync(None, 0)
    state = source.state()
    assert json.loads(json.dumps(state)) == state
    assert set(state["pending"]) == {"row-1"}
    source.close()
