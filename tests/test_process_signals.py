"""The flag that stages poll, and the watchdog's verdicts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_cli.process.rankfile import RankFile, RankFiles
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_clock_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    dog = Watchdog(files(tmp_path, (1, "rollout")), 10.0)
    assert dog.look(100.0) is None
    assert dog.look(101.0) is None
