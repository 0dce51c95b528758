"""Whole runs of `grpo train` with real engines: asynchronous ones add up, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.rollout import engines
from tests.rollout.runs import AHEAD, TIMEOUT_S, command, rows, train

pytestmark = [*engines.real_engine, pytest.mark.slow]


def test_an_asynchronous_run_counts_every_prompt(tmp_path):
    run = train(tmp_path / "run", "rollout=vllm_server", "trainer.steps=6", *AHEAD)
    steps = rows(run)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        assert row["groups/trained_count"] == 4.0  # trainer.prompts_per_step of the smoke experiment
        assert row["staleness/max"] <= 1.0
        assert row["sync/logprob_gap_max"] < 1e-3
        assert 0.0 <= row["rollout/overlap"] <= 1.0
    assert max(row["staleness/max"] for row in steps) == 1.0
    fates = [prompt for row in rows(run, "ledger.jsonl") for prompt in row["trained"]]
    fates += [prompt for row in rows(run, "ledger.jsonl") for prompts in row["dropped"].values() for prompt in prompts]
    assert len(fates) == len(set(fates))
    in_line = rows(run, "ledger.jsonl")[-1]["drawn"] - len(fates)
    assert 0 <= in_line <= 4 * 4


@pytest.mark.parametrize("victim", ["server", "trainer"])
def test_killed_in_mid_run_ends_in_time_and_leaves_nothing(tmp_path, victim):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = command(
        tmp_path / "run", "rollout=vllm_server", "trainer.steps=5000", "filter.max_empty_steps=null", *AHEAD
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while len(rows(tmp_path / "run")) < 2:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        marks = {"server": "grpo_cli.rollout.server_main", "trainer": "grpo_cli.worker"}
        found = [
            child
            for child in family
            if marks[victim] in child.cmdline() and "grpo_cli.process.agent" not in child.cmdline()
        ]
        assert len(found) == 1
        os.kill(found[0].pid, signal.SIGKILL)
        at = time.monotonic()
        assert process.wait(60.0) == 1
        assert time.monotonic() - at < 30.0
        if victim == "server":
            assert "The vLLM server" in (tmp_path / "log").read_text()
        _, alive = psutil.wait_procs(family, timeout=15.0)
        assert [left for left in alive if left.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        if process.poll() is None:
            process.kill()
