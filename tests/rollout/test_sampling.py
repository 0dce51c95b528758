"""The words that all backends share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_cli.rollout.sampling import Sampling, completion_seed, eos_token_ids
from tests.configs import make_config


def config(*overrides: str):
    return make_config("experiment=smoke", *overrides)


def test_rollout_and_eval_sampling_come_from_their_sections():
    cfg = config(
        "rollout.temperature=0.7", "rollout.top_k=5", "rollout.stop=[END]", "eval.samples=3", "eval.temperature=0.5"
    )
    training, evaluation = Sampling.of_rollout(cfg), Sampling.of_eval(cfg)
    assert (training.n, training.temperature, training.top_k, training.stop) == (8, 0.7, 5, ("END",))
    assert (evaluation.n, evaluation.temperature, evaluation.top_k, evaluation.stop) == (3, 0.5, None, ("END",))


@pytest.mark.parametrize(
    ("changed", "truncated"),
    [({}, False), ({"top_k": -1}, False), ({"top_k": 0, "min_p": 0.0}, False)]
    + [(changed, True) for changed in ({"top_k": 1}, {"top_p": 0.99}, {"min_p": 0.1})],
)
def test_truncated(changed, truncated):
    assert Sampling(n=1, max_new_tokens=1, temperature=1.0, **changed).truncated is truncated


def test_seeds_are_those_of_the_completion():
    seeds = {completion_seed(0, group, index) for group in ("1-0", "1-1", "2-0") for index in range(4)}
    assert len(seeds) == 12
    assert completion_seed(0, "1-0", 0) != completion_seed(1, "1-0", 0)


@pytest.mark.parametrize(
    ("listed", "own", "ids"),
    [([2, 3], 2, {2, 3}), (3, 2, {2, 3}), (None, 2, {2}), ([5], None, {5}), (None, None, set())],
)
def test_every_eos_of_model_and_tokenizer_counts(listed, own, ids):
    found = eos_token_ids(SimpleNamespace(eos_token_id=listed), SimpleNamespace(eos_token_id=own))
    assert found == ids
