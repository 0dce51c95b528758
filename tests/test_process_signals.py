"""The flag that stages poll, and the watchdog's verdicts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from grpo_cli.process.rankfile import Beat, RankFile, RankFiles, process_start
from grpo_cli.process.signals import HANDLED, Interrupted, Stop
from grpo_cli.process.watchdog import Watchdog
from grpo_cli.reward import pool


@pytest.fixture
def stop() -> Iterator[Stop]:
    before = {signum: signal.getsignal(signum) for signum in HANDLED}
    made = Stop()
    made.install(RankFile(None, 0))
    yield made
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_armed_signal_is_a_flag(stop: Stop, signum: int) -> None:
    stop.arm()
    stop.check()
    os.kill(os.getpid(), signum)
    os.kill(os.getpid(), signum)  # the scheduler's and the parent's: one request
    assert stop.requested()
    assert stop.signum == signum
    with pytest.raises(Interrupted):
        stop.check()


def test_forked_child_dies_of_the_signal_as_it_would(stop: Stop) -> None:
    stop.arm()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not stop.requested()


@pytest.mark.parametrize(("armed", "count", "pause"), [(False, 1, 0.0), (True, 2, 1.1)])
def test_unarmed_or_second_signal_ends_at_once(armed: bool, count: int, pause: float, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        made = Stop()
        made.install(RankFile(str(tmp_path), 0))
        if armed:
            made.arm()
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(pause)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    assert RankFiles(tmp_path).exits()[0].code == 143


def test_signal_during_scoring_is_seen_within_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef reward(**_):\n    time.sleep(60)\n")
    made = Stop()
    monkeypatch.setattr(pool, "stop", made)
    workers = pool.Pool("slow", pool.Job("python", _options(tmp_path), None), 1, 60.0)
    threading.Timer(0.5, lambda: setattr(made, "_signum", signal.SIGTERM)).start()
    started = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            workers.run([({}, 1)])
    finally:
        workers.close()
    assert time.monotonic() - started < 20


def _options(directory: Path) -> dict:
    return {"path": str(directory / "slow.py"), "function": "reward"}


def files(directory: Path, *beats: tuple[int, str]) -> RankFiles:
    """Ranks that are alive (this process) at (step, stage)."""
    for rank, (step, stage) in enumerate(beats):
        told = RankFile(str(directory), rank)
        told.register()
        told.beat(step, stage)
    return RankFiles(directory)


def test_watchdog_is_silent_while_beats_come(tmp_path: Path) -> None:
    dog = Watchdog(files(tmp_path, (1, "rollout")), 10.0)
    assert dog.look(0.0) is None
    files(tmp_path, (1, "update"))
    assert dog.look(9.0) is None
    assert dog.look(18.0) is None


def test_watchdog_does_not_watch_the_start_nor_the_ended(tmp_path: Path) -> None:
    dog = Watchdog(files(tmp_path, (0, "starting"), (5, "update")), 10.0)
    RankFile(str(tmp_path), 1).finish(0, None)
    assert dog.look(0.0) is None
    assert dog.look(1000.0) is None


def test_watchdog_names_the_rank_that_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.process.watchdog._TRACE_WAIT_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    dog = Watchdog(files(tmp_path, (7, "rollout"), (6, "update"), (7, "rollout")), 10.0)
    dog.look(0.0)
    told = dog.look(11.0) or ""
    assert "Rank 1 stands still in step 6, stage update" in told
    assert "(0, 2) wait for it" in told


RANK = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "a"), all_threads=True)
code = "import time\\ndef stand():\\n  print(flush=True)\\n  time.sleep(60)\\nstand()"
exec(compile(code, sys.argv[2], "exec"))
"""
"""A rank that stands in a function of the file that its second argument names."""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen]]:
    """Rank 0 in code of its own, rank 1 inside a collective; their beats are the test's."""
    places = ["/x/reward.py", "/x/torch/distributed/distributed_c10d.py"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / f"{rank}.trace"), place], stdout=subprocess.PIPE, text=True
        )
        for rank, place in enumerate(places)
    ]
    for rank, process in enumerate(started):
        assert process.stdout is not None
        process.stdout.readline()
        (tmp_path / f"{rank}.pid").write_text(f"{process.pid} {process_start(process.pid)}")
    yield started
    for process in started:
        process.kill()
        process.communicate()


def beat(directory: Path, rank: int, count: int) -> None:
    (directory / f"{rank}.beat").write_text(json.dumps(asdict(Beat(3, 0, count, "rollout"))))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_waits_for_a_slow_one_is_never_accused(
    nodes: int, tmp_path: Path, ranks: list[subprocess.Popen]
) -> None:
    dog = Watchdog(RankFiles(tmp_path), 60.0, nodes)
    beat(tmp_path, 1, 1)
    for minute in range(4):
        beat(tmp_path, 0, minute)
        assert dog.look(minute * 40.0) is None
    told = dog.look(181.0) or ""  # rank 0 moved last at 120 s
    assert "Rank 0 stands still in step 3, stage rollout" in told
    assert "The others (1) wait for it." in told


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_all_wait_the_fault_may_be_on_another_node(tmp_path: Path, ranks: list[subprocess.Popen]) -> None:
    (tmp_path / "0.pid").unlink()
    for nodes, accused in ((2, False), (1, True)):
        dog = Watchdog(RankFiles(tmp_path), 60.0, nodes)
        beat(tmp_path, 1, 1)
        assert dog.look(0.0) is None
        assert bool(dog.look(61.0)) is accused


def test_the_first_weight_sync_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr("grpo_cli.process.watchdog._TRACE_WAIT_S", 0.0)
    dog = Watchdog(files(tmp_path, (0, "first weight sync")), 10.0)
    assert dog.look(0.0) is None
    assert "step 0, stage first weight sync" in (dog.look(11.0) or "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_clock_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    dog = Watchdog(files(tmp_path, (1, "rollout")), 10.0)
    assert dog.look(100.0) is None
    assert dog.look(101.0) is None
