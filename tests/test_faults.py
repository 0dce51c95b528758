"""What a cluster does to a run: stopped, killed and resumed runs end as the undisturbed one. Real workers, tiny
model."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from configs import make_config

from grpo_cli import status
from grpo_cli.checkpoint import manifest
from grpo_cli.files.jsonio import read_rows
from grpo_cli.files.rundir import RunDir

SOURCES = Path(__file__).parent.parent / "src"
TIMES = ("time/", "rollout/tokens_per_s", "update/tokens_per_s")
STEPS = 8

RUN = """
import json, sys
from grpo_cli.launch import launch
sys.exit(launch(json.loads(sys.argv[1]), sys.argv[2]))
"""


def resolved(*overrides: str) -> dict[str, Any]:
    """A run whose epochs (10 rows) end in the middle of steps, with refilling and carried groups."""
    config = make_config(
        "model=tiny",
        "filter=dynamic_sampling",
        "reward=regex",
        "reward.terms=[{name: regex, weight: 1.0, pattern: '\\d'}]",
        "model.dtype=float32",
        "data.train_size=10",
        "data.max_prompt_tokens=64",
        "filter.max_rounds=3",
        "rollout.num_generations=4",
        "rollout.max_new_tokens=12",
        "trainer.prompts_per_step=3",
        "trainer.lr=3e-3",
        f"trainer.steps={STEPS}",
        "trainer.save_every=2",
        *overrides,
    )
    return config.model_dump()


STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True, scope="module")
def nothing_stays() -> Iterator[None]:
    """A test that fails leaves no run behind."""
    yield
    for process in STARTED:
        process.kill()


def start(run_dir: Path, config: dict[str, Any]) -> subprocess.Popen:
    config = copy.deepcopy(config)
    config["run"]["dir"] = str(run_dir)
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with open(run_dir.with_suffix(".log"), "a") as log:
        command = [sys.executable, "-c", RUN, json.dumps(config), str(run_dir)]
        STARTED.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    return STARTED[-1]


def finish(run_dir: Path, config: dict[str, Any]) -> None:
    process = start(run_dir, config)
    assert process.wait(timeout=300) == 0, run_dir.with_suffix(".log").read_text()


def rows(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what a clock measured."""
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMES)}
        for row in read_rows(run_dir / "metrics.jsonl")
    ]


def wait_rows(process: subprocess.Popen, run_dir: Path, count: int) -> None:
    until = time.monotonic() + 120
    while process.poll() is None and len(read_rows(run_dir / "metrics.jsonl")) < count:
        assert time.monotonic() < until, run_dir.with_suffix(".log").read_text()
        time.sleep(0.02)


def wait_worker(process: subprocess.Popen, run_dir: Path) -> None:
    while process.poll() is None and not workers(run_dir):
        time.sleep(0.02)


def workers(run_dir: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"grpo_cli.worker" in words and str(run_dir).encode() in words and b"grpo_cli.process.agent" not in words:
            found.append(int(path.parent.name))
    return sorted(found)


def assert_same_end(got: Path, whole: Path) -> None:
    """Every row of the metrics, every group of every dump, weights, moments and random states, and the ledger."""
    assert rows(got) == rows(whole)
    assert [row["step"] for row in rows(got)] == list(range(1, STEPS + 1))
    assert (got / "ledger.jsonl").read_text() == (whole / "ledger.jsonl").read_text()
    for (step, mine), (_, theirs) in zip(RunDir(got).rollout_files(), RunDir(whole).rollout_files(), strict=True):
        assert mine.read_text() == theirs.read_text(), step
    files = [manifest.read(run / "checkpoints" / manifest.directory_name(STEPS))["files"] for run in (got, whole)]  # type: ignore[index]
    state = [name for name in files[1] if name.startswith(("slices_", "rng_"))]
    assert state
    assert [files[0][name]["sha256"] for name in state] == [files[1][name]["sha256"] for name in state]
    told = status.status(got)
    assert told["faults"] == []
    prompts = told["prompts"]
    assert prompts["drawn"] == prompts["trained"] + sum(prompts["dropped"].values()) + prompts["pending"]


@pytest.mark.slow
def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    """SIGTERM and SIGINT to the parent or to the worker, SIGKILL to either; the same command each time."""
    finish(tmp_path / "whole", resolved())
    draw = random.Random(7)
    run_dir = tmp_path / "run"
    for attempt, blow in enumerate(_blows(draw)):
        to_worker, signum = blow
        process = start(run_dir, resolved())
        wait_worker(process, run_dir)
        if attempt % 2:  # else: at any moment of the start
            wait_rows(process, run_dir, len(read_rows(run_dir / "metrics.jsonl")) + 1)
        time.sleep(draw.random() * (0.5 if attempt % 2 else 4))
        for pid in workers(run_dir) if to_worker else [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        code = process.wait(timeout=120)
        allowed = {0, 128 + signum, -signum} | ({1} if to_worker else set())
        assert code in allowed, run_dir.with_suffix(".log").read_text()
    finish(run_dir, resolved())
    assert_same_end(run_dir, tmp_path / "whole")
    assert len(RunDir(run_dir).state()["previous"]) == 10
    assert workers(run_dir) == []


def _blows(draw: random.Random) -> Iterator[tuple[bool, int]]:
    blows = [(False, signal.SIGTERM), (False, signal.SIGINT), (True, signal.SIGTERM)] * 2
    blows += [(False, signal.SIGKILL), (True, signal.SIGKILL)] * 2
    draw.shuffle(blows)
    yield from blows


@pytest.mark.slow
def test_signal_to_one_of_two_ranks_saves_on_both(tmp_path: Path) -> None:
    two = "trainer.nproc_per_node=2"
    finish(tmp_path / "whole", resolved(two))
    run_dir = tmp_path / "run"
    process = start(run_dir, resolved(two))
    wait_rows(process, run_dir, 3)
    os.kill(workers(run_dir)[-1], signal.SIGTERM)
    assert process.wait(timeout=120) == 143, (tmp_path / "run.log").read_text()
    state = RunDir(run_dir).state()
    assert (state["status"], state["exit_code"]) == ("stopped", 143)
    saved = next(manifest.newest_first(run_dir / "checkpoints"))
    assert saved[0] == state["step"]
    assert manifest.problems(saved[1]) == []
    finish(run_dir, resolved(two))
    assert_same_end(run_dir, tmp_path / "whole")
