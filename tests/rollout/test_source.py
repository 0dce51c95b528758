"""The synchronous source: who generates what, in which order, and what is counted."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from grpo_cli.advantage import assign
from grpo_cli.process.signals import Interrupted
from grpo_cli.rollout.source import SyncSource
from grpo_cli.types import Completion, Group, Prompt
from tests.configs import make_config


class Data:
    """Prompts p0, p1, ... up to `size`."""

    def __init__(self, size: int):
        self.size, self.cursor = size, 0

    def next(self, count: int) -> list[Prompt]:
        stop = min(self.cursor + count, self.size)
        prompts = [Prompt(f"p{index}", "", [index], None) for index in range(self.cursor, stop)]
        self.cursor = stop
        return prompts

    def state(self) -> dict:
        return {"cursor": self.cursor}

    def load_state(self, state: dict) -> None:
        self.cursor = state["cursor"]


class Rollout:
    def __init__(self):
        self.asked: list[list[str]] = []
        self.closed = False

    def generate(self, prompts, step, version, sampling=None):
        self.asked.append([group_id for group_id, _ in prompts])
        return [
            Group(group_id, prompt, [Completion("x", [1, 2, 3], "stop")], step, version) for group_id, prompt in prompts
        ]

    def sync(self, policy, version):
        return {"time/weight_sync": 1.0}

    def metrics(self):
        return {"rollout/vllm_running_requests": float(len(self.asked))}

    def close(self):
        self.closed = True


class Scorer:
    def score(self, groups):
        return groups

    def metrics(self):
        return {"reward/timeout_count": 1.0}

    def close(self):
        pass


class Refill:
    """Asks for `needed` prompts in each of `rounds` rounds; drops the prompts named in `bad`."""

    def __init__(self, needed: int, rounds: int, bad: set[str]):
        self.needed, self.rounds, self.bad = needed, rounds, bad
        self.kept, self.dropped = [], []

    def wanted(self) -> int:
        missing = self.needed - len(self.kept)
        return missing if self.rounds and missing > 0 else 0

    def add(self, groups):
        self.rounds -= 1
        for group in groups:
            (self.dropped if group.prompt.prompt_id in self.bad else self.kept).append(group)

    def result(self):
        return self.kept, self.dropped, {"groups/rounds": 1.0}


class Filter:
    def __init__(self, rounds: int = 1, bad: set[str] | None = None):
        self.rounds, self.bad = rounds, bad or set()

    def refill(self, needed: int, version: int) -> Refill:
        return Refill(needed, self.rounds, self.bad)

    def state(self) -> dict:
        return {"carried": []}

    def load_state(self, state: dict) -> None:
        assert state == {"carried": []}


class OneRank:
    rank, world, first = 0, 1, True

    def gather(self, value):
        return [value]


class ThreadRanks:
    """Two ranks as threads."""

    def __init__(self, rank: int, shelf: list, barrier: threading.Barrier):
        self.rank, self.world, self.shelf, self.barrier = rank, 2, shelf, barrier

    def gather(self, value):
        self.shelf[self.rank] = value
        self.barrier.wait(10)
        everyone = list(self.shelf)
        self.barrier.wait(10)
        return everyone


def config(prompts: int = 2) -> SimpleNamespace:
    return SimpleNamespace(trainer=SimpleNamespace(prompts_per_step=prompts))


def ids(groups: list[Group]) -> list[tuple[str, str]]:
    return [(group.group_id, group.prompt.prompt_id) for group in groups]


def test_steps_number_their_groups_and_end_with_the_data():
    rollout = Rollout()
    source = SyncSource(config(), Data(3), rollout, Scorer(), Filter(), OneRank())
    source.sync(None, 7)
    first, tail = source.step(0), source.step(1)
    assert ids(first.kept) == [("0-0", "p0"), ("0-1", "p1")]
    assert ids(tail.kept) == [("1-0", "p2")]
    assert source.step(2) is None
    assert {group.policy_version for group in first.kept} == {7}
    source.close()
    assert rollout.closed


def test_rounds_number_on_and_dropped_prompts_are_consumed():
    data = Data(10)
    source = SyncSource(config(), data, Rollout(), Scorer(), Filter(rounds=3, bad={"p0", "p2"}), OneRank())
    groups = source.step(5)
    # Round 1: p0 falls away, p1 stays; round 2 asks for the one missing: p2 falls away; round 3: p3 stays.
    assert ids(groups.kept) == [("5-1", "p1"), ("5-3", "p3")]
    assert ids(groups.dropped) == [("5-0", "p0"), ("5-2", "p2")]
    assert source.state() == {"data": {"cursor": 4}, "filter": {"carried": []}}


def test_measures_of_a_step():
    metrics = SyncSource(config(), Data(2), Rollout(), Scorer(), Filter(), OneRank()).step(0).metrics
    assert metrics["reward/timeout_count"] == 1.0
    assert metrics["groups/rounds"] == 1.0
    # Two groups of one completion of three tokens.
    assert metrics["rollout/tokens_per_s"] * metrics["time/rollout"] == pytest.approx(6.0)
    assert metrics["time/reward"] >= 0


def test_two_ranks_share_the_prompts_and_see_the_same_groups():
    shelf, barrier, results = [None, None], threading.Barrier(2), [None, None]
    rollouts = [Rollout(), Rollout()]

    def run(rank: int) -> None:
        ranks = ThreadRanks(rank, shelf, barrier)
        results[rank] = SyncSource(config(5), Data(5), rollouts[rank], Scorer(), Filter(), ranks).step(1)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert rollouts[0].asked == [["1-0", "1-2", "1-4"]]
    assert rollouts[1].asked == [["1-1", "1-3"]]
    for result in results:
        assert ids(result.kept) == [(f"1-{index}", f"p{index}") for index in range(5)]
        assert result.metrics["reward/timeout_count"] == 2.0  # summed over ranks


def test_groups_that_come_back_in_another_order_keep_their_rewards():
    """Case A11: P1 (1, 0) and P2 (0, 0), whatever the order in which engine and scorer answer."""
    rewards = {"p0": (1.0, 0.0), "p1": (0.0, 0.0), "p2": (0.0, 3.0)}

    class Shuffled(Rollout):
        def generate(self, prompts, step, version, sampling=None):
            return [
                Group(group_id, prompt, [Completion("x", [1], "stop"), Completion("y", [1], "stop")], step, version)
                for group_id, prompt in [prompts[index] for index in (2, 0, 1)]
            ]

    class Backwards(Scorer):
        def score(self, groups):
            for group in groups:
                for completion, reward in zip(group.completions, rewards[group.prompt.prompt_id], strict=True):
                    completion.rewards, completion.unshaped, completion.reward = {"exact": reward}, reward, reward
            return groups[::-1]

    kept = SyncSource(config(3), Data(3), Shuffled(), Backwards(), Filter(), OneRank()).step(1).kept
    assign(kept, make_config())
    found = {(g.prompt.prompt_id, index): c.advantage for g in kept for index, c in enumerate(g.completions)}
    want = {
        ("p0", 0): 0.7071,
        ("p0", 1): -0.7071,
        ("p1", 0): 0.0,
        ("p1", 1): 0.0,
        ("p2", 0): -0.7071,
        ("p2", 1): 0.7071,
    }
    assert found == pytest.approx(want, abs=1e-4)


def test_state_goes_on_where_it_was_taken():
    first = SyncSource(config(), Data(6), Rollout(), Scorer(), Filter(), OneRank())
    first.step(0)
    second = SyncSource(config(), Data(6), Rollout(), Scorer(), Filter(), OneRank())
    second.load_state(first.state())
    assert ids(second.step(1).kept) == [("1-0", "p2"), ("1-1", "p3")]


def test_a_signal_on_one_rank_interrupts_all_of_them_together():
    shelf, barrier, ended = [None, None], threading.Barrier(2), [False, False]

    class Signalled(Rollout):
        def generate(self, prompts, step, version, sampling=None):
            raise Interrupted

    rollouts = [Rollout(), Signalled()]

    def run(rank: int) -> None:
        try:
            SyncSource(config(2), Data(2), rollouts[rank], Scorer(), Filter(), ThreadRanks(rank, shelf, barrier)).step(
                1
            )
        except Interrupted:
            ended[rank] = True

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert ended == [True, True]
