"""The policy in one process: passes, updates, refusals, schedules."""

from __future__ import annotations

import pytest
import torch

from grpo_cli import ranks
from grpo_cli.batch import pack
from grpo_cli.trainer import Policy
from tests import tiny


@pytest.fixture(scope="module")
def alone():
    return ranks.start()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.tiny_model(tmp_path_factory.mktemp("llama"))


def step(policy: Policy, groups, number: int = 1) -> dict[str, float]:
    batch = pack(groups, policy.cfg, policy.ranks)
    return policy.add_logprobs(batch) | policy.update(batch, number)


def test_a_step_trains_and_tells_what_it_did(alone, llama):
    policy = Policy(tiny.config(f"model.path={llama}"), alone)
    before = {name: tensor.clone() for name, tensor in policy.gathered_parameters()}
    metrics = step(policy, tiny.make_groups())
    assert metrics["updates/applied_count"] == 1
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    assert "time/old_logprobs" not in metrics
    assert "kl" not in metrics
    assert any(not torch.equal(before[name], tensor) for name, tensor in policy.gathered_parameters())
