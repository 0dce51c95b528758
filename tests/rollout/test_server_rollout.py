"""Rollout `vllm_server` on a scripted server that it did not start: what it leaves behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_cli.errors import RunError
from grpo_cli.rollout import make_rollout
from grpo_cli.rollout.vllm_server import device_teams
from tests.rollout import engines
from tests.rollout.scripted_server import ScriptedServer


@pytest.fixture
def started(tmp_path):
    """(server, what it answers by path, an asynchronous rollout on it)."""
    answers = {}

    async def answer(path, body):
        return answers.get(path, {})

    server = ScriptedServer(answer)
    words = ("rollout=vllm_server", f"rollout.server_url={server.url}", "rollout.max_staleness=1")
    policy = engines.Policy()
    rollout = make_rollout(engines.config(*words, f"run.dir={tmp_path}"), policy, engines.RANKS)
    yield server, answers, policy, rollout
    rollout.close()
    server.close()


def test_a_sync_that_fails_leaves_the_server_going(started):
    server, answers, policy, rollout = started
    assert server.paths() == ["/resume"]  # a run that was killed in its sync may have left it paused
    answers["/collective_rpc"] = (500, {"error": "no such file"})
    with pytest.raises(RunError, match="no such file"):
        rollout.sync(policy, 1)
    assert server.paths()[1:] == ["/pause", "/collective_rpc", "/resume"]


def test_what_fails_in_closing_keeps_no_server_alive(started, monkeypatch):
    rollout = started[-1]
    ended = []
    servers = [SimpleNamespace(close=lambda number=number: ended.append(number)) for number in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "_processes", servers)
        patch.setattr(rollout._client, "close", lambda: 1 / 0)
        patch.setattr(rollout._sender, "close", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rollout.close()
    assert sorted(ended) == [0, 1]


def test_servers_for_nccl_never_share_the_trainers_devices():
    cfg = engines.config("rollout=vllm_server", "rollout.weight_sync=nccl", "trainer.nproc_per_node=2")
    assert [devices for devices, _ in device_teams(cfg, 4)] == [[2], [3]]
    with pytest.raises(RunError, match=r"beside the trainer's 2; 2 are visible"):
        device_teams(cfg, 2)
    shared = engines.config("rollout=vllm_server", "rollout.weight_sync=disk", "trainer.nproc_per_node=2")
    assert [devices for devices, _ in device_teams(shared, 2)] == [[0], [1]]
