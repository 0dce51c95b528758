"""Ranks that share an engine leave it together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from grpo_cli.process.signals import stop
from grpo_cli.rollout.vllm import told_to_stop


def test_each_team_leaves_at_the_first_agreement_after_a_signal_to_one_of_it():
    """Teams are ranks 0, 1 and 2, 3; signals come to rank 1 at step 5, and to rank 3 at step 20."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(4):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": port}
        env = os.environ | {key: str(value) for key, value in place.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "tests.rollout.team_worker"]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        told = [process.communicate(timeout=150)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert told == [["16"], ["16"], ["32"], ["32"]]


def test_an_engine_of_ones_own_is_left_at_once(monkeypatch):
    monkeypatch.setattr(stop, "_signum", 15)
    assert told_to_stop(1, None)
