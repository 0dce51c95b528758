"""The parent of a run: exit codes, signals, and nobody left behind. Workers are scripted: no model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_cli.launch import _with_room, command, environment
from grpo_cli.process.watchdog import waits_in_collective

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src"

RUN = """
import json, sys
from grpo_cli.launch import launch
sys.exit(launch(json.loads(sys.argv[1]), sys.argv[2], "scripted_worker"))
"""


def config(ranks: int = 2, timeout_s: float = 60.0, name: str = "r") -> dict:
    trainer = {"nnodes": 1, "nproc_per_node": ranks, "rdzv_endpoint": None, "steps": 5, "step_timeout_s": timeout_s}
    return {"run": {"seed": 7, "name": name}, "trainer": trainer}


STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """A test that fails leaves no run behind."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


def start(script: str, run_dir: Path, cfg: dict | None = None) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": f"{SOURCES}:{TESTS}", "SCRIPT": script, "WANDB_API_KEY": "k" * 40}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(cfg or config()), str(run_dir)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def run(script: str, run_dir: Path, cfg: dict | None = None) -> tuple[int, str, dict]:
    """(exit code, standard error, run.json)"""
    process = start(script, run_dir, cfg)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors, json.loads((run_dir / "run.json").read_text())


def wait_ready(process: subprocess.Popen, ranks: int = 2) -> None:
    assert process.stdout
    for _ in range(ranks):
        assert "ready" in process.stdout.readline()


def processes_of(run_dir: Path) -> list[int]:
    """Processes that have the run directory on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(run_dir).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_gone(run_dir: Path) -> None:
    until = time.monotonic() + 10
    while processes_of(run_dir) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes_of(run_dir) == []


@pytest.mark.parametrize(
    ("script", "code", "status", "reason"),
    [
        ("guard", 3, "guard", "the sync check failed in layers.0"),
        ("config", 2, "refused", "some_rule"),
        ("fails", 1, "failed", "it broke; the key is <WANDB_API_KEY>"),
        ("killed", 1, "failed", "Rank 1 died of SIGKILL"),
    ],
)
def test_exit_code_and_run_json(tmp_path: Path, script: str, code: int, status: str, reason: str) -> None:
    got, errors, state = run(script, tmp_path / "run")
    assert got == state["exit_code"] == code
    assert state["status"] == status
    assert reason in state["reason"]
    assert code == 0 or reason in errors
    assert "Traceback" not in errors
    assert "kkkk" not in errors
    wait_gone(tmp_path / "run")


@pytest.mark.parametrize("script", ["hangs", "frozen"])
def test_watchdog_names_the_rank_that_stands_still(tmp_path: Path, script: str) -> None:
    code, errors, state = run(script, tmp_path / "run", config(timeout_s=1.0))
    assert code == 1
    assert "Rank 1 stands still in step 3, stage update" in state["reason"]
    assert "Rank 1" in errors
    wait_gone(tmp_path / "run")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("slow", "Rank 0 stands still in step 3, stage record, for more than trainer.step_timeout_s=3 seconds."),
        ("lost", "Rank 1 died of SIGKILL"),
    ],
)
def test_ranks_in_a_collective_wait_for_a_slow_one_and_end_with_a_lost_one(
    tmp_path: Path, script: str, told: str
) -> None:
    code, _, state = run(script, tmp_path / "run", config(timeout_s=3.0))
    assert code == 1
    assert told in state["reason"]
    wait_gone(tmp_path / "run")


def test_signal_to_the_parent_stops_all_ranks(tmp_path: Path) -> None:
    process = start("waits", tmp_path / "run")
    wait_ready(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    state = json.loads((tmp_path / "run/run.json").read_text())
    assert (state["status"], state["exit_code"]) == ("stopped", 130)
    wait_gone(tmp_path / "run")


def test_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    process = start("waits", tmp_path / "run")
    wait_ready(process)
    workers = [
        pid for pid in processes_of(tmp_path / "run") if b"agent" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(max(workers), signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    wait_gone(tmp_path / "run")


def test_second_signal_kills_at_once(tmp_path: Path) -> None:
    process = start("frozen", tmp_path / "run")
    assert process.stdout
    assert "ready" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 143
    wait_gone(tmp_path / "run")


def test_signal_before_anything_can_be_saved(tmp_path: Path) -> None:
    process = start("unarmed", tmp_path / "run")
    wait_ready(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 143
    state = json.loads((tmp_path / "run/run.json").read_text())
    assert "before the first step" in state["reason"]


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    place = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    process = start("waits", tmp_path / "run")
    wait_ready(process)
    process.kill()
    process.wait()
    wait_gone(tmp_path / "run")
    assert list(place.glob(f"grpo-ranks-{process.pid}-*"))  # nobody could clean up
    code, _, state = run("done", tmp_path / "run", config(ranks=1))
    assert (code, state["status"], state["reason"]) == (0, "done", "all went well")
    assert [attempt["status"] for attempt in state["previous"]] == ["lost"]
    assert not list(place.glob(f"grpo-ranks-{process.pid}-*"))


def test_stray_grandchildren_are_ended(tmp_path: Path) -> None:
    before = set(_sleepers())
    code, _, _ = run("child", tmp_path / "run", config(ranks=1))
    assert code == 0
    assert set(_sleepers()) <= before


def _sleepers() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"time.sleep(600)" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_end_is_written_down_where_nobody_reads_it(tmp_path: Path) -> None:
    """A terminal that was closed, or `| head`: the last word fails, and run.json and the exit code are right."""
    process = start("guard", tmp_path / "run")
    assert process.stderr
    process.stderr.close()
    assert process.wait(timeout=60) == 3
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (state["status"], state["exit_code"]) == ("guard", 3)


def test_files_of_the_users_that_are_called_like_modules_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numbers", "profile", "platform"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # this test's own `python -c`, which the command is not
    process = start("done", tmp_path / "run")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    monkeypatch.delenv("PYTHONSAFEPATH")
    assert environment(config(), tmp_path)["PYTHONSAFEPATH"] == "1"
    assert command(config(), tmp_path)[1] == "-P"


def test_ranks_tell_where_there_is_room(tmp_path: Path) -> None:
    assert _with_room("/proc", str(tmp_path)) == tmp_path
    assert list(tmp_path.iterdir()) == []
    assert _with_room(str(tmp_path), "/proc") == tmp_path


def test_second_run_in_one_directory_is_refused(tmp_path: Path) -> None:
    first = start("waits", tmp_path / "run")
    wait_ready(first)
    second = start("done", tmp_path / "run")
    _, errors = second.communicate(timeout=20)
    assert second.returncode == 1  # the exception reaches the command line, which makes it exit 2
    assert "run_dir_is_fresh" in errors
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=20) == 143


def test_command_of_several_nodes(tmp_path: Path) -> None:
    cfg = config()
    cfg["trainer"].update(nnodes=3, rdzv_endpoint="127.0.0.1:29533")
    line = command(cfg, tmp_path)
    assert "--nnodes=3" in line
    assert "--rdzv-endpoint=127.0.0.1:29533" in line
    assert "--standalone" not in line


def test_threads_are_shared_and_the_users_choice_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(config(ranks=2), tmp_path)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment(config(ranks=2), tmp_path)["OMP_NUM_THREADS"] == "3"


def test_collective_is_told_from_work() -> None:
    waiting = 'Thread 0x1 (most recent call first):\n  File "a/threading.py", line 3 in wait\nCurrent thread 0x2:\n' + (
        '  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n  File "w.py", line 1 in <module>\n'
    )
    assert waits_in_collective(waiting)
    assert not waits_in_collective(waiting.replace("torch/distributed/", "torch/nn/"))
    assert not waits_in_collective("")
