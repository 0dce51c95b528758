"""Accuracy, avg@n and pass@k from scripted completions, on one rank and on several."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from types import SimpleNamespace

import pytest

from grpo_cli import evaluate as module
from grpo_cli.eval_worker import bring_weights
from grpo_cli.evaluate import Outcome, due, evaluate, headline, measures, pass_at_k
from grpo_cli.process.signals import Interrupted
from grpo_cli.rollout.sampling import Sampling
from grpo_cli.types import Completion, Group, Prompt
from tests.configs import make_config


@pytest.mark.parametrize(
    ("words", "times"),
    [
        (["rollout=vllm_server", "rollout.server_url=http://localhost:8000"], 1),
        (["rollout=vllm_server"], 0),  # its engine has loaded model.path itself
        (["rollout=hf"], 0),
    ],
)
def test_a_server_that_was_there_already_is_sent_the_model(words, times):
    """It holds whatever the last run sent it; its name says nothing about that."""
    sent = []
    rollout = SimpleNamespace(sync=lambda policy, version: sent.append((policy, version)))
    policy = SimpleNamespace(version=0)
    bring_weights(config(*words), policy, rollout)
    assert sent == [(policy, 0)] * times


def config(*overrides: str):
    return make_config("experiment=smoke", *overrides)


@pytest.mark.parametrize(("samples", "correct"), [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (5, 2), (6, 6)])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_one(samples, correct):
    marks = [True] * correct + [False] * (samples - correct)
    for k in range(1, samples + 1):
        subsets = list(combinations(marks, k))
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def test_measures_are_means_over_prompts():
    outcomes = [
        Outcome([True, False, False, False], [1.0, 0.0, 0.5, None], [2, 4, 6, 8], [False, False, True, True]),
        Outcome([True, True, False, False], [1.0, 1.0, 0.0, 0.0], [1, 1, 1, 1], [False] * 4),
    ]
    assert measures(outcomes, 4, [1, 2]) == {
        "eval/avg@4": pytest.approx((1 / 4 + 2 / 4) / 2),
        "eval/pass@1": pytest.approx((1 / 4 + 2 / 4) / 2),
        "eval/pass@2": pytest.approx((1 / 2 + 5 / 6) / 2),  # 1 - C(3,2)/C(4,2), 1 - C(2,2)/C(4,2)
        "eval/reward": pytest.approx(3.5 / 7),
        "eval/tokens_mean": 3.0,
        "eval/truncated_frac": 0.25,
        "eval/prompts_count": 2.0,
        "eval/unscored_count": 1.0,
    }


def test_nothing_scored_is_no_reward_instead_of_zero():
    metrics = measures([Outcome([False], [None], [3], [False])], 1, [1])
    assert metrics == {
        "eval/tokens_mean": 3.0,
        "eval/truncated_frac": 0.0,
        "eval/prompts_count": 1.0,
        "eval/unscored_count": 1.0,
    }
    told = headline(config(), metrics)
    assert told == "no held-out problem was evaluated: none of 1 completions could be scored"


def test_no_prompts_no_metrics():
    assert measures([], 1, [1]) == {}


class Scripted:
    """Rollout and scorer in one: prompt i is answered correctly by its first i samples."""

    def __init__(self):
        self.asked: list[tuple[str, Sampling]] = []
        self.drained = 0
        self.scored: list[int] = []

    def generate(self, prompts, step, version, sampling=None):
        self.asked += [(group_id, sampling) for group_id, _ in prompts]
        return [
            Group(group_id, prompt, [Completion("", [7] * 3, "stop") for _ in range(sampling.n)], step, version)
            for group_id, prompt in prompts
        ]

    def score(self, groups):
        self.scored.append(len(groups))
        for group in groups:
            for index, completion in enumerate(group.completions):
                completion.unshaped = 2.0 if index < int(group.prompt.answer) else 1.5
                completion.reward = completion.unshaped - 1.0
        return groups

    def metrics(self):
        self.drained += 1
        return {}


class Rank:
    """Rank `rank` of `world`; gathers what the others, run before, have left in `shares`."""

    def __init__(self, rank: int, world: int, shares: list):
        self.rank, self.world, self.shares = rank, world, shares

    def gather(self, item):
        self.shares.append(item)
        return list(self.shares)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"row-{i}", "", [1], str(i)) for i in range(count)]


def test_ranks_share_the_prompts_and_agree():
    cfg = config(
        "eval.samples=4",
        "eval.k=[1,4]",
        "eval.temperature=0.7",
        "reward.terms=[{name: regex, weight: 2.0, pattern: x}]",
    )
    alone = Scripted()
    whole = evaluate(cfg, prompts(5), alone, alone, Rank(0, 1, []), step=3, version=1)
    assert whole["eval/avg@4"] == pytest.approx((0 + 1 + 2 + 3 + 4) / 4 / 5)  # 1.5 of 2 is not correct
    assert whole["eval/pass@4"] == pytest.approx(4 / 5)
    shares: list = []
    ranks = [Scripted(), Scripted()]
    for rank, scripted in enumerate(ranks):
        last = evaluate(cfg, prompts(5), scripted, scripted, Rank(rank, 2, shares), step=3, version=1)
    assert sorted(group_id for scripted in ranks for group_id, _ in scripted.asked) == [f"eval-{i}" for i in range(5)]
    assert {key: value for key, value in last.items() if key != "time/eval"} == {
        key: pytest.approx(value) for key, value in whole.items() if key != "time/eval"
    }
    assert all(sampling.temperature == 0.7 for _, sampling in alone.asked)
    assert alone.drained == 1


def test_as_many_are_scored_at_a_time_as_in_training():
    """reward.timeout_s is for a step's completions: 3 prompts x 4 in training are 6 prompts x 2 here, 3 a rank."""
    cfg = config("trainer.prompts_per_step=3", "rollout.num_generations=4", "eval.samples=2", "eval.k=[1]")
    for world, sizes in ((1, [6, 6, 2]), (2, [3, 3, 1])):
        scripted = Scripted()
        others = [[]] * (world - 1)
        evaluate(cfg, prompts(14), scripted, scripted, Rank(0, world, others), step=0, version=0)
        assert scripted.scored == sizes


def test_a_rank_without_prompts_takes_part():
    scripted = Scripted()
    outcome = Outcome([True], [2.0], [3], [False])
    metrics = evaluate(config(), prompts(1), scripted, scripted, Rank(1, 2, [[outcome]]), step=0, version=0)
    assert metrics["eval/avg@1"] == 1.0
    assert scripted.asked == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_on_one_rank_ends_the_evaluation_on_all(rank):
    class Signalled(Scripted):
        def generate(self, *arguments):
            raise Interrupted

    scripted = Signalled() if rank == 0 else Scripted()
    others = [None] if rank == 1 else [[Outcome([True], [2.0], [3], [False])]]
    metrics = evaluate(config(), prompts(2), scripted, scripted, Rank(rank, 2, others), step=0, version=0)
    assert metrics == {}
    assert headline(config(), metrics) == "no held-out problem was evaluated"


def test_due_before_during_and_after():
    cfg = config("trainer.eval_every=4")
    assert [step for step in range(11) if due(cfg, step, is_last=step == 10)] == [0, 4, 8, 10]
    assert not any(due(config("trainer.eval_every=null"), step, is_last=step == 10) for step in range(11))


def test_headline_says_how():
    metrics = {"eval/avg@1": 0.857, "eval/prompts_count": 100.0}
    assert headline(config(), metrics) == "85.7 % of 100 held-out problems correct (greedy)"
    sampled = headline(
        config("eval.samples=4", "eval.temperature=0.7"), {"eval/avg@4": 0.5, "eval/prompts_count": 10.0}
    )
    assert sampled == "50 % of 10 held-out problems correct (4 samples each at 0.7)"


def test_importing_it_needs_neither_torch_nor_hydra():
    code = f"import sys; import {module.__name__}; sys.exit(bool({{'torch', 'hydra'}} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
