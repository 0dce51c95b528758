"""Saving and resuming: bit by bit on the same layout, correct on another, and never from half a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli import export
from grpo_cli.checkpoint import manifest
from grpo_cli.checkpoint import store as checkpoint
from grpo_cli.checkpoint.tensorfile import TensorWriter
from grpo_cli.errors import ConfigError, RunError
from grpo_cli.files.rundir import RunDir
from grpo_cli.process import ranks
from grpo_cli.trainer.policy import Policy
from tests import tiny
from tests.checkpoint_worker import SAVED, job

LAST = 4
STAGES = [[f"trainer.zero_stage={stage}"] for stage in range(4)]
BFLOAT16 = ["model.dtype=bfloat16"]
OFFLOAD = ["trainer.offload_optimizer=true"]
LAYOUTS = {
    **{f"bfloat16 {stage}": [*STAGES[stage], *BFLOAT16] for stage in range(4)},
    "float32 1 offload": [*STAGES[1], *OFFLOAD],
    "bfloat16 1 offload": [*STAGES[1], *BFLOAT16, *OFFLOAD],
    "bfloat16 2 offload": [*STAGES[2], *BFLOAT16, *OFFLOAD],
    "float32 3 offload": [*STAGES[3], *OFFLOAD, "trainer.offload_param=true"],
    "bfloat16 3 offload": [*STAGES[3], *BFLOAT16, *OFFLOAD, "trainer.offload_param=true"],
}
"""Beside float32 without offload. Each is a class, or a branch of one, of DeepSpeed's."""


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
    assert resumed["version"] == whole["version"]
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_type_stage_and_offload_resumes_bit_identically(
    layout: str, llama: Path, alone: ranks.Ranks, tmp_path: Path
) -> None:
    last = SAVED + 1
    whole = job(str(llama), LAYOUTS[layout], f"{tmp_path}/a", "never", last, alone)
    resumed = job(str(llama), LAYOUTS[layout], f"{tmp_path}/b", str(path_of(tmp_path / "a")), last, alone)
    assert_identical(resumed, whole)


def test_adapters_resume(llama: Path, alone: ranks.Ranks, tmp_path: Path) -> None:
    keys = ["model.lora={rank: 4, alpha: 8, dropout: 0.1, target_modules: [q_proj, v_proj]}"]
    whole = job(str(llama), keys, f"{tmp_path}/a", "never", LAST, alone)
    resumed = job(str(llama), keys, f"{tmp_path}/b", str(path_of(tmp_path / "a")), LAST, alone)
    assert_identical(resumed, whole)


@pytest.fixture(scope="module")
def two(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Two processes: undisturbed and resumed at every stage and, last, at stage 1 in bfloat16; then from the checkpoint
    of another stage."""
    home = tmp_path_factory.mktemp("two")
    jobs: list[list[Any]] = []
    for number, keys in enumerate([*STAGES, LAYOUTS["bfloat16 1"]]):
        jobs.append([keys, f"{home}/{number}", "never", LAST])
        jobs.append([keys, f"{home}/r{number}", str(path_of(home / str(number))), LAST])
    jobs.append([STAGES[3], f"{home}/2to3", str(path_of(home / "2")), LAST])
    return home, in_processes(2, llama, home / "out.json", jobs)


@pytest.mark.parametrize("number", range(5))
def test_two_processes_resume_bit_identically(number: int, two: tuple[Path, list[dict]]) -> None:
    whole, resumed = two[1][2 * number : 2 * number + 2]
    assert_identical(resumed, whole)


def test_two_processes_resume_at_another_stage(two: tuple[Path, list[dict]]) -> None:
    assert_continues(two[1][-1], two[1][4])


@pytest.mark.parametrize(("saved", "now"), [(2, 0), (3, 3)])
def test_checkpoint_of_two_processes_resumes_on_one(
    saved: int, now: int, two: tuple[Path, list[dict]], llama: Path, alone: ranks.Ranks
) -> None:
    home, results = two
    resumed = job(str(llama), STAGES[now], f"{home}/one{saved}{now}", str(path_of(home / str(saved))), LAST, alone)
    assert_continues(resumed, results[2 * saved])


def test_checkpoint_of_one_process_resumes_on_three(one: tuple[Path, list[dict]], llama: Path, tmp_path: Path) -> None:
    home, whole = one
    jobs = [[STAGES[stage], f"{tmp_path}/{stage}", str(path_of(home / "1")), LAST] for stage in (3,)]
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


# -- faults ----------------------------------------------------------------------------------------------


@pytest.fixture
def small(llama: Path, alone: ranks.Ranks, tmp_path: Path) -> tuple[Any, RunDir, Policy]:
    """A run with whole checkpoints of steps 4 and 8 and the policy that made them."""
    cfg = tiny.config(f"model.path={llama}", "trainer.keep_checkpoints=2", "logger.console=plain")
    run_dir = RunDir.create(tmp_path / "run")
    policy = Policy(cfg, alone)
    for step in (4, 8):
        checkpoint.save(cfg, run_dir, alone, policy, {"step": step, "policy": policy.state()})
    return cfg, run_dir, policy


def weights_of(directory: Path) -> Path:
    return directory / "slices_00000.safetensors"


def change_a_byte(directory: Path) -> None:
    data = bytearray(weights_of(directory).read_bytes())
    data[-100] ^= 1
    weights_of(directory).write_bytes(data)


def make_empty(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def name_a_pickle(directory: Path) -> None:
    written = json.loads((directory / manifest.NAME).read_text())
    (directory / "state.pt").write_bytes(b"\x80\x04.")
    written["files"]["state.pt"] = {"size": 3, "sha256": manifest.sha256(directory / "state.pt")}
    (directory / manifest.NAME).write_text(json.dumps(written))


def forget_a_size(directory: Path) -> None:
    text = (directory / manifest.NAME).read_text()
    (directory / manifest.NAME).write_text(text.replace('"size"', '"sizd"', 1))


DAMAGES = {
    "it is empty": make_empty,
    "bytes instead of": lambda d: os.truncate(weights_of(d), 1000),
    "has 0 bytes": lambda d: os.truncate(d / "rng_00000.json", 0),
    "never finished": lambda d: (d / manifest.NAME).unlink(),
    "another content": change_a_byte,
    "is missing": lambda d: weights_of(d).unlink(),
    "missing or broken": forget_a_size,
    "no name of a checkpoint's file": name_a_pickle,
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_damaged_checkpoint_is_passed_over_or_refused(
    reason: str, small: tuple, alone: ranks.Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, run_dir, policy = small
    newest = path_of(run_dir.path, 8)
    DAMAGES[reason](newest)
    explicit = tiny.config(f"model.path={cfg.model.path}", f"trainer.resume={newest}")
    with pytest.raises(ConfigError, match="resume_checkpoint_complete") as caught:
        checkpoint.load(explicit, run_dir, alone, policy)
    assert reason in str(caught.value)
    state = checkpoint.load(cfg, run_dir, alone, policy)
    assert state is not None
    assert state["step"] == 4
    told = capsys.readouterr().out
    assert reason in told
    assert "Resumed after step 4" in told


def test_slices_that_the_manifest_does_not_name_are_not_read(small: tuple, alone: ranks.Ranks) -> None:
    """Beside the whole file, half of another checkpoint's: unread, where every part would be filled in twice."""
    cfg, run_dir, policy = small
    newest = path_of(run_dir.path, 8)
    before = {name: tensor.clone() for name, tensor in policy.gathered_parameters()}
    (newest / "slices_00001.safetensors").write_bytes(weights_of(path_of(run_dir.path, 4)).read_bytes())
    assert checkpoint.load(cfg, run_dir, alone, policy)["step"] == 8  # type: ignore[index]
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.gathered_parameters())


def test_the_config_is_compared_with_the_checkpoint_that_is_taken(small: tuple, alone: ranks.Ranks) -> None:
    """The newest, of the same learning rate, is damaged inside; the older one is of another."""
    cfg, run_dir, policy = small
    change_a_byte(path_of(run_dir.path, 8))
    other = cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"lr": 0.5})})
    with pytest.raises(ConfigError, match=r"resume_config_unchanged.*trainer.allow_config_change"):
        checkpoint.load(other, run_dir, alone, policy)


def test_half_written_one_aside_is_never_looked_at(small: tuple, alone: ranks.Ranks) -> None:
    cfg, run_dir, policy = small
    os.rename(path_of(run_dir.path, 8), run_dir.checkpoints / ".aside_step_000012")
    state = checkpoint.load(cfg, run_dir, alone, policy)
    assert state is not None
    assert state["step"] == 4
    checkpoint.save(cfg, run_dir, alone, policy, {"step": 5, "policy": policy.state()})
    assert not list(run_dir.checkpoints.glob(".aside*"))


def test_missing_path_is_refused(small: tuple, alone: ranks.Ranks) -> None:
    cfg, run_dir, policy = small
    wrong = tiny.config(f"model.path={cfg.model.path}", f"trainer.resume={run_dir.path}/nowhere")
    with pytest.raises(ConfigError, match="no such directory"):
        checkpoint.load(wrong, run_dir, alone, policy)


def test_fresh_start_says_where_it_looked(
    llama: Path, alone: ranks.Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = tiny.config(f"model.path={llama}", "logger.console=plain")
    run_dir = RunDir.create(tmp_path)
    run_dir.append_metrics({"step": 1})  # of an attempt that never saved
    assert checkpoint.load(cfg, run_dir, alone, None) is None
    told = capsys.readouterr().out
    assert f"no whole checkpoint in {tmp_path}/checkpoints" in told
    assert "run.dir=DIR" in told
    assert run_dir.metrics_path.read_text() == ""


def test_full_disk_leaves_the_older_ones(small: tuple, alone: ranks.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, run_dir, policy = small
    before = sorted(path.name for path in run_dir.checkpoints.iterdir())

    def full(self: TensorWriter, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for place in ("fsync", "rename"):
        monkeypatch.setattr(os, place, lambda *_: full(None, None))  # type: ignore[arg-type]
        with pytest.raises(RunError, match="disk is full"):
            checkpoint.save(cfg, run_dir, alone, policy, {"step": 9, "policy": policy.state()})
        monkeypatch.undo()
        assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == before
    assert manifest.problems(path_of(run_dir.path, 8)) == []


def test_rotation_keeps_the_newest_whole_ones(small: tuple, alone: ranks.Ranks) -> None:
    cfg, run_dir, policy = small
    checkpoint.save(cfg, run_dir, alone, policy, {"step": 12, "policy": policy.state()})
    assert [step for step, _ in manifest.newest_first(run_dir.checkpoints)] == [12, 8]
    change = cfg.trainer.model_copy(update={"keep_checkpoints": 1})
    (path_of(run_dir.path, 12) / manifest.NAME).unlink()
    checkpoint._rotate(run_dir.checkpoints, 1)
    assert [step for step, _ in manifest.newest_first(run_dir.checkpoints)] == [12, 8]  # 8 is the last whole one
    checkpoint.save(cfg.model_copy(update={"trainer": change}), run_dir, alone, policy, {"step": 13, "policy": {}})
    assert [step for step, _ in manifest.newest_first(run_dir.checkpoints)] == [13]


def test_another_runs_checkpoint_leaves_nothing_of_this_one_in_sight(
    small: tuple, alone: ranks.Ranks, tmp_path: Path
) -> None:
    """Also not the one of the same step: a save of that step would find it, and believe that it is its own."""
    cfg, run_dir, policy = small
    for step in range(1, 10):
        run_dir.append_metrics({"step": step})
    elsewhere = tmp_path / "elsewhere" / "step_000004"
    shutil.copytree(path_of(run_dir.path, 4), elsewhere)
    before = path_of(run_dir.path, 4).stat().st_ino
    checkpoint.load(tiny.config(f"model.path={cfg.model.path}", f"trainer.resume={elsewhere}"), run_dir, alone, policy)
    assert list(manifest.newest_first(run_dir.checkpoints)) == []
    assert run_dir.metrics_path.read_text() == ""
    saved = checkpoint.save(cfg, run_dir, alone, policy, {"step": 4, "policy": {}})
    assert saved.stat().st_ino != before


def test_going_back_takes_the_later_ones_out_of_sight(small: tuple, alone: ranks.Ranks) -> None:
    cfg, run_dir, policy = small
    for step in range(1, 10):
        run_dir.append_metrics({"step": step})
    back = tiny.config(f"model.path={cfg.model.path}", f"trainer.resume={path_of(run_dir.path, 4)}")
    checkpoint.load(back, run_dir, alone, policy)
    assert [step for step, _ in manifest.newest_first(run_dir.checkpoints)] == [4]
    assert len(list(run_dir.checkpoints.glob("superseded_step_000008_*"))) == 1
    assert len(run_dir.metrics_path.read_text().splitlines()) == 4


def test_step_that_is_saved_already_is_left_alone_and_a_damaged_one_replaced(small: tuple, alone: ranks.Ranks) -> None:
    cfg, run_dir, policy = small
    state = path_of(run_dir.path, 8) / manifest.STATE
    before = state.stat().st_ino
    checkpoint.save(cfg, run_dir, alone, policy, {"step": 8, "policy": policy.state()})
    assert state.stat().st_ino == before
    state.write_text("{}")
    checkpoint.save(cfg, run_dir, alone, policy, {"step": 8, "policy": policy.state()})
    assert manifest.problems(path_of(run_dir.path, 8)) == []


def test_other_model_is_refused(small: tuple, alone: ranks.Ranks, tmp_path: Path) -> None:
    _, run_dir, _ = small
    other = tiny.tiny_model(tmp_path / "gpt2", "gpt2")
    cfg = tiny.config(f"model.path={other}", f"trainer.resume={path_of(run_dir.path, 8)}")
    with pytest.raises(ConfigError, match="resume_matches_run"):
        checkpoint.load(cfg, run_dir, alone, Policy(cfg, alone))


def test_random_state_that_does_not_fit_is_an_error(small: tuple, alone: ranks.Ranks) -> None:
    from grpo_cli.checkpoint import randomstate

    state = randomstate.capture()
    randomstate.restore(state)
    with pytest.raises(RunError, match="random state"):
        randomstate.restore({**state, "torch": "AAAA"})


def test_pickle_is_never_run(small: tuple, alone: ranks.Ranks, tmp_path: Path) -> None:
    """A weights file that is a pickle, with a manifest made to fit: refused, and nothing ran."""
    cfg, run_dir, policy = small
    sentinel = tmp_path / "sentinel"

    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (sentinel,))

    directory = path_of(run_dir.path, 8)
    torch.save(Evil(), weights_of(directory))
    written = json.loads((directory / manifest.NAME).read_text())
    entry = {"size": weights_of(directory).stat().st_size, "sha256": manifest.sha256(weights_of(directory))}
    written["files"][weights_of(directory).name] = entry
    (directory / manifest.NAME).write_text(json.dumps(written))
    assert any("no safetensors" in problem for problem in manifest.problems(directory))
    explicit = tiny.config(f"model.path={cfg.model.path}", f"trainer.resume={directory}")
    with pytest.raises(ConfigError, match="no safetensors"):
        checkpoint.load(explicit, run_dir, alone, policy)
    with pytest.raises(ConfigError, match="no safetensors"):
        export.main([str(run_dir.path), str(tmp_path / "out"), "--step", "8"])
    assert not sentinel.exists()


def test_sources_unpickle_nothing() -> None:
    for path in (Path(__file__).parent.parent / "src").rglob("*.py"):
        text = path.read_text()
        assert "weights_only=False" not in text, path
        # A reward worker unpickles what its own parent sends it through a socket pair; nothing comes from a file.
        assert "pickle.load" not in text or (path.name == "worker.py" and path.parent.name == "reward"), path
        assert "torch.load(" not in text, path


def test_tensor_file_reads_back_and_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr("grpo_cli.checkpoint.tensorfile.PIECE", 7)  # several pieces a tensor
    tensors = {"a": torch.randn(5, 6).t(), "b": torch.randn(3).bfloat16(), "c": torch.zeros(0)}
    writer = TensorWriter(tmp_path / "x.safetensors", {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    assert writer.close() == manifest.sha256(tmp_path / "x.safetensors")
    assert writer.size == (tmp_path / "x.safetensors").stat().st_size
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(tensor, tensors[name])
