"""Whole runs of `grpo train` with real engines: backends agree, asynchronous runs add up, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.rollout import engines

pytestmark = [*engines.real_engine, pytest.mark.slow]

TIMEOUT_S = 600.0
AHEAD = ["rollout.max_staleness=1", "loss.correction.mode=truncate", "loss.correction.high=2.0"]


def command(directory: Path, *overrides: str) -> list[str]:
    base = ["experiment=smoke", "trainer.resume=never", "logger.console=plain", "rollout.sync_tolerance=0.001"]
    return [sys.executable, "-m", "grpo_cli.cli", "train", *base, f"run.dir={directory}", *overrides]


def train(directory: Path, *overrides: str) -> Path:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run(command(directory, *overrides), env=environment, check=True, timeout=TIMEOUT_S)
    return directory


def rows(directory: Path, name: str = "metrics.jsonl") -> list[dict]:
    path = directory / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tokens(directory: Path) -> dict[str, list[list[int]]]:
    groups = [json.loads(line) for path in directory.glob("rollouts/*.jsonl") for line in path.read_text().splitlines()]
    return {group["group_id"]: [completion["token_ids"] for completion in group["completions"]] for group in groups}


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
