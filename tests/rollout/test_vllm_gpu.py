"""vLLM on CUDA devices: sleep, every way of weight sync, tensor parallelism and whole runs in bfloat16."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo_cli.errors import GuardStop, RunError
from grpo_cli.process.ranks import Ranks
from grpo_cli.rollout import make_rollout, weight_sync, weight_transfer
from grpo_cli.rollout.sync import logprob_gap, probe_tokens
from tests.rollout import engines
from tests.rollout.runs import AHEAD, TIMEOUT_S, rows, train

pytestmark = [
    pytest.mark.gpu,
    *engines.real_engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.slow,
]

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

TOLERANCE = 0.05
"""nats, of `conf/rollout`; moving the weights of the tiny model by 30 % changes its logprobs by more than 0.3."""

MEMORY = 0.1
"""Of the device, for an engine: far more than the tiny model, so that nearly all of it is the KV cache."""

BFLOAT16 = ("model.dtype=bfloat16", f"rollout.sync_tolerance={TOLERANCE}")
COLOCATED = ("rollout=vllm", f"rollout.gpu_memory_utilization={MEMORY}")


@pytest.mark.parametrize("sleep_level", [0, 1, 2])
def test_an_engine_beside_the_trainer_takes_new_weights_and_gives_its_memory_back(sleep_level):
    words = [f"rollout.sync_tolerance={TOLERANCE}", f"rollout.gpu_memory_utilization={MEMORY}"]
    command = [sys.executable, "-m", "tests.rollout.vllm_gpu_worker", str(sleep_level), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert min(found["moved"]) > 2 * TOLERANCE  # stale weights would show
    assert len(found["gap"]) == 3
    assert max(found["gap"]) < TOLERANCE
    assert max(found["sampled"]) < 2 * TOLERANCE  # more tokens than the check's, so a rarer rounding among them
    given_back = [after - awake for awake, after in zip(found["free_awake"], found["free_after"], strict=True)]
    if sleep_level:
        assert min(given_back) > MEMORY / 2
    else:
        assert max(map(abs, given_back)) < MEMORY / 4


@pytest.fixture(scope="module", params=["disk", "ipc", pytest.param("nccl", marks=two_devices)])
def server(request, tmp_path_factory):
    """A server of the run's own with one way of weight sync, and a policy on the first device."""
    torch.cuda.set_device(0)
    policy = engines.Policy(device="cuda:0", dtype=torch.bfloat16)
    directory = tmp_path_factory.mktemp(request.param)
    words = ("rollout=vllm_server", f"rollout.weight_sync={request.param}", f"run.dir={directory}", *BFLOAT16)
    rollout = make_rollout(engines.config(*words), policy, Ranks(0, 1, 0, torch.device("cuda", 0)))
    yield policy, rollout
    rollout.close()


def test_a_server_takes_new_weights(server):
    policy, rollout = server
    asked = engines.prompts(policy, "What is 1 + 2?", "Hi")
    probe = probe_tokens(policy.tokenizer)
    for version in range(1, 4):
        before = policy.score(*probe)
        policy.move(0.3, seed=version)
        assert logprob_gap(policy.score(*probe), before) > 2 * TOLERANCE  # stale weights would show
        assert rollout.sync(policy, version)["sync/logprob_gap_max"] < TOLERANCE
        groups = rollout.generate(asked, version, version)
        assert [(group.group_id, group.policy_version) for group in groups] == [("1-0", version), ("1-1", version)]
        assert engines.largest_gap(policy, groups) < 2 * TOLERANCE


def test_a_family_that_did_not_arrive_at_a_server_is_named(server, monkeypatch):
    policy, rollout = server
    policy.restore(engines.Policy(device="cuda:0", dtype=torch.bfloat16).weights())
    wrong = lambda policy: ((n, t * 4 if "up_proj" in n else t) for n, t in policy.gathered_parameters())  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(weight_sync, "named_copies", wrong)  # disk
        patch.setattr(weight_transfer, "named_copies", wrong)  # nccl, ipc
        with pytest.raises(
            GuardStop, match=r"Weights that differ: model\.layers\.\*\.mlp\.up_proj\.weight \(by [^,]*$"
        ):
            rollout.sync(policy, 4)
    assert rollout.sync(policy, 5)["sync/logprob_gap_max"] < TOLERANCE


@two_devices
def test_a_server_that_dies_in_a_broadcast_ends_the_sync(tmp_path, monkeypatch):
    torch.cuda.set_device(0)
    policy = engines.Policy(device="cuda:0", dtype=torch.bfloat16)
    words = ("rollout=vllm_server", "rollout.weight_sync=nccl", f"run.dir={tmp_path}", *BFLOAT16)
    rollout = make_rollout(engines.config(*words), policy, Ranks(0, 1, 0, torch.device("cuda", 0)))

    def weights(policy):
        for number, named in enumerate(policy.gathered_parameters()):
            if number == 1:  # the server has begun to receive
                time.sleep(2.0)
                os.kill(rollout._processes[0].pid, signal.SIGKILL)
            yield named

    monkeypatch.setattr(weight_transfer, "named_copies", weights)
    began = time.monotonic()
    try:
        with pytest.raises(RunError, match="SIGKILL"):
            rollout.sync(policy, 1)
        assert time.monotonic() - began < 30.0
    finally:
        rollout.close()


@pytest.mark.parametrize("sleep_level", [0, 2])
def test_a_run_in_bfloat16_on_one_device(sleep_level, tmp_path):
    words = (*COLOCATED, *BFLOAT16, f"rollout.sleep_level={sleep_level}", "trainer.zero_stage=2", "trainer.steps=3")
    assert_trained(train(tmp_path / "run", *words), steps=3)


@two_devices
def test_two_ranks_share_one_engine(tmp_path):
    ranks = ("trainer.nproc_per_node=2", "trainer.zero_stage=3", "rollout.tensor_parallel_size=2")
    assert_trained(train(tmp_path / "run", *COLOCATED, *BFLOAT16, *ranks, "trainer.steps=3"), steps=3)


@two_devices
@pytest.mark.parametrize("how", ["nccl", "disk"])
def test_an_asynchronous_run_generates_on_a_device_of_its_own(how, tmp_path):
    own = ("rollout.devices=[1]", f"rollout.weight_sync={how}", "rollout.sleep_level=0")
    run = assert_trained(train(tmp_path / "run", *COLOCATED, *BFLOAT16, *own, *AHEAD, "trainer.steps=6"), steps=6)
    assert max(row["staleness/max"] for row in rows(run)) == 1.0
    assert {row["groups/trained_count"] for row in rows(run)} == {4.0}  # trainer.prompts_per_step of the experiment


def assert_trained(run: Path, steps: int) -> Path:
    """Every step sampled from fresh weights, and some trained (a step whose groups all have one reward does not)."""
    found = rows(run)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    for row in found:
        assert row["sync/logprob_gap_max"] < TOLERANCE
    assert max(row.get("grad_norm", 0.0) for row in found) > 0.0
    return run
