"""Saving and resuming: bit by bit on the same layout, correct on another, and never from half a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli import checkpoint, manifest, ranks
from grpo_cli.errors import ConfigError, RunError
from grpo_cli.rundir import RunDir
from grpo_cli.tensorfile import TensorWriter
from grpo_cli.trainer import Policy
from tests import tiny
from tests.checkpoint_worker import SAVED, job

LAST = 4
STAGES = [[f"trainer.zero_stage={stage}"] for stage in range(4)]
BFLOAT16 = ["model.dtype=bfloat16"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("llama"), "llama-tied")


@pytest.fixture(scope="module")
def alone() -> ranks.Ranks:
    return ranks.start()


def path_of(run_dir: Path, step: int = SAVED) -> Path:
    return run_dir / "checkpoints" / manifest.directory_name(step)


def in_processes(world: int, model: Path, out: Path, jobs: list[list[Any]]) -> list[dict]:
    """Results of `jobs` in `world` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        env = os.environ | {name: str(value) for name, value in place.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", "tests.checkpoint_worker", str(model), str(out), json.dumps(jobs)]
        log = (out.parent / f"rank{rank}.log").open("w")
        processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join((out.parent / f"rank{rank}.log").read_text() for rank in range(world))
    return json.loads(out.read_text())


def assert_identical(resumed: dict, whole: dict) -> None:
    """Rows (loss, norm, random draws), weights, moments and random states: bit by bit."""
    assert resumed["rows"] == whole["rows"][SAVED:]
    assert resumed["weights"] == whole["weights"]
    state = [name for name in whole["files"] if name.startswith(("slices_", "rng_"))]
    assert {name: resumed["files"][name] for name in state} == {name: whole["files"][name] for name in state}
    assert resumed["version"] == LAST
    assert resumed["problems"] == []


def assert_continues(resumed: dict, whole: dict, rel: float = 1e-4) -> None:
    """The same run on another layout: sums are added up in another order."""
    for mine, theirs in zip(resumed["rows"], whole["rows"][SAVED:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=rel, abs=rel / 50)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=rel)
    assert resumed["weights"] == {
        name: pytest.approx(value, rel=rel, abs=rel) for name, value in whole["weights"].items()
    }


@pytest.fixture(scope="module")
def one(llama: Path, alone: ranks.Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Undisturbed runs of one process at every stage; their directory has a subdirectory a stage."""
    home = tmp_path_factory.mktemp("one")
    return home, [job(str(llama), keys, f"{home}/{stage}", "never", LAST, alone) for stage, keys in enumerate(STAGES)]


@pytest.mark.parametrize("stage", range(4))
def test_resumed_run_is_bit_identical(
    stage: int, one: tuple[Path, list[dict]], llama: Path, alone: ranks.Ranks
) -> None:
    home, whole = one
    resumed = job(str(llama), STAGES[stage], f"{home}/r{stage}", str(path_of(home / str(stage))), LAST, alone)
    assert_identical(resumed, whole[stage])


@pytest.mark.parametrize(("saved", "now"), [(0, 3), (3, 1), (2, 0), (1, 2)])
def test_resumes_at_another_stage(
    saved: int, now: int, one: tuple[Path, list[dict]], llama: Path, alone: ranks.Ranks
) -> None:
    home, whole = one
    resumed = job(str(llama), STAGES[now], f"{home}/{saved}to{now}", str(path_of(home / str(saved))), LAST, alone)
    assert_continues(resumed, whole[saved])


def test_bfloat16_keeps_its_float32_weights(llama: Path, alone: ranks.Ranks, tmp_path: Path) -> None:
    for stage in (0, 2):
        keys = [*STAGES[stage], *BFLOAT16]
        whole = job(str(llama), keys, f"{tmp_path}/a{stage}", "never", LAST, alone)
        resumed = job(str(llama), keys, f"{tmp_path}/b{stage}", str(path_of(tmp_path / f"a{stage}")), LAST, alone)
        assert_identical(resumed, whole)


def test_adapters_resume(llama: Path, alone: ranks.Ranks, tmp_path: Path) -> None:
    keys = ["model.lora={rank: 4, alpha: 8, dropout: 0.1, target_modules: [q_proj, v_proj]}"]
    whole = job(str(llama), keys, f"{tmp_path}/a", "never", LAST, alone)
    resumed = job(str(llama), keys, f"{tmp_path}/b", str(path_of(tmp_path / "a")), LAST, alone)
    assert_identical(resumed, whole)


@pytest.fixture(scope="module")
def two(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Two processes: undisturbed and resumed at every stage; then from the checkpoint of another stage."""
    home = tmp_path_factory.mktemp("two")
    jobs: list[list[Any]] = []
    for stage, keys in enumerate(STAGES):
        jobs.append([keys, f"{home}/{stage}", "never", LAST])
        jobs.append([keys, f"{home}/r{stage}", str(path_of(home / str(stage))), LAST])
    jobs.append([STAGES[3], f"{home}/2to3", str(path_of(home / "2")), LAST])
    return home, in_processes(2, llama, home / "out.json", jobs)


@pytest.mark.parametrize("stage", range(4))
def test_two_processes_resume_bit_identically(stage: int, two: tuple[Path, list[dict]]) -> None:
    whole, resumed = two[1][2 * stage : 2 * stage + 2]
    assert_identical(resumed, whole)


def test_two_processes_resume_at_another_stage(two: tuple[Path, list[dict]]) -> None:
    assert_continues(two[1][8], two[1][4])


@pytest.mark.parametrize(("saved", "now"), [(2, 0), (3, 3)])
def test_checkpoint_of_two_processes_resumes_on_one(
    saved: int, now: int, two: tuple[Path, list[dict]], llama: Path, alone: ranks.Ranks
) -> None:
    home, results = two
    resumed = job(str(llama), STAGES[now], f"{home}/one{saved}{now}", str(path_of(home / str(saved))), LAST, alone)
    assert_continues(resumed, results[2 * saved])


def test_checkpoint_of_one_process_resumes_on_three(one: tuple[Path, list[dict]], llama: Path, tmp_path: Path) -> None:
    home, whole = one
    jobs = [[STAGES[stage], f"{tmp_path}/{stage}", str(path_of(home / "1")), LAST] for stage in (2, 3)]
    for resumed in in_processes(3, llama, tmp_path / "out.json", jobs):
        assert_continues(resumed, whole[1])


def test_every_rank_has_its_files_in_the_manifest(two: tuple[Path, list[dict]]) -> None:
    for stage in range(4):
        directory = path_of(two[0] / str(stage))
        written = manifest.read(directory)
        assert written is not None
        assert {p.name for p in directory.iterdir()} == {manifest.NAME, *written["files"]}
        assert {f"slices_0000{rank}.safetensors" for rank in (0, 1)} <= set(written["files"])
        assert written["world_size"] == 2
