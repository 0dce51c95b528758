"""Whole runs of `grpo train` with real engines: the backends agree."""

from __future__ import annotations

import pytest

from tests.rollout import engines
from tests.rollout.runs import rows, tokens, train

pytestmark = [*engines.real_engine, pytest.mark.slow]


@pytest.mark.parametrize("backend", ["vllm", "vllm_server"])
def test_the_reward_rises_as_with_hf(tmp_path, backend):
    """The bounds are those of tests/test_smoke.py, where transformers generates."""
    rewards = [row["reward"] for row in rows(train(tmp_path / "run", f"rollout={backend}"))]
    assert len(rewards) == 20
    assert sum(rewards[:5]) / 5 < 0.45
    assert sum(rewards[-5:]) / 5 > 0.8


def test_two_sharded_ranks_with_engines_and_one_process_with_a_server_do_the_same(tmp_path):
    dump = "logger.dump_rollouts=true"
    ranks = ["trainer.nproc_per_node=2", "trainer.zero_stage=3"]
    colocated = train(tmp_path / "colocated", "rollout=vllm", "trainer.steps=3", *ranks, dump)
    served = train(tmp_path / "served", "rollout=vllm_server", "trainer.steps=3", dump)
    assert len(rows(colocated)) == len(rows(served)) == 3
    for one, other in zip(rows(colocated), rows(served), strict=True):
        assert one["sync/logprob_gap_max"] < 1e-3
        assert other["sync/logprob_gap_max"] < 1e-3
        assert one["reward"] == other["reward"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert tokens(colocated) == tokens(served)
