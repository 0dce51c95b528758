"""Worker processes: bounded, replaced, alone with what they need, and gone in the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rewards import asked, python_term, scoring, values

from grpo_cli.process.signals import Interrupted, Stop
from grpo_cli.reward.pool import Failure, Job, Pool

SOURCE = """
import os, signal, subprocess, sys, time

def f(completions):
    return [act(text) for text in completions]

def act(text):
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        os._exit(3)
    if text == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if text == "pid":
        return os.getpid()
    if text == "child":
        return subprocess.Popen(["sleep", "1000"]).pid
    if text == "spin":
        while True:
            pass
    if text == "stdin":
        return len(sys.stdin.read())
    if text == "secrets":
        names = ("GRPO_SERVER_KEY", "WANDB_API_KEY", "HF_TOKEN", "RANK", "MASTER_ADDR")
        initial = open("/proc/self/environ").read()
        return sum(name in os.environ or name + "=" in initial for name in names)
    if text == "other":
        return float("OTHER_KEY" in os.environ)
    return 1.0
"""


@pytest.fixture
def term(tmp_path):
    return python_term(tmp_path, SOURCE)


def alive(pid: float) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids: list[float], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("die", "reward/worker_death_count"),
        ("exit", "reward/worker_death_count"),
        ("spin", "reward/timeout_count"),
        ("stop", "reward/timeout_count"),
    ],
)
def test_a_dead_or_late_worker_costs_its_request_only(term, text, metric):
    with scoring(term, timeout_s=0.7) as scorer:
        first, lost, second = (values(scorer, [asked("5", name)], "f")[0][0] for name in ["pid", text, "pid"])
        assert lost is None
        assert first != second
        assert wait_gone([first])
        assert {key: count for key, count in scorer.metrics().items() if count} == {metric: 1.0}


def test_a_worker_that_dies_while_idle_is_replaced_without_loss(term):
    with scoring(term) as scorer:
        ((pid,),) = values(scorer, [asked("5", "pid")], "f")
        os.kill(int(pid), 9)
        assert wait_gone([pid])
        assert values(scorer, [asked("5", "x", "y")], "f") == [[1.0, 1.0]]
        assert not any(scorer.metrics().values())


def test_an_interrupted_call_leaves_nothing_to_the_next(term, monkeypatch):
    """The run is told to stop in the middle of a call: it ends at once, and its late reply answers no later call."""
    told = Stop()
    monkeypatch.setattr("grpo_cli.reward.pool.stop", told)
    with scoring(term) as scorer:
        assert values(scorer, [asked("5", "x")], "f") == [[1.0]]
        threading.Timer(0.3, lambda: setattr(told, "_signum", 15)).start()
        before = time.monotonic()
        with pytest.raises(Interrupted):
            scorer.score([asked("5", "spin")])
        assert time.monotonic() - before < 5.0
        told._signum = 0
        assert values(scorer, [asked("5", "x", "y", "z")], "f") == [[1.0, 1.0, 1.0]]


def test_close_leaves_no_process(term):
    with scoring(term, workers=2) as scorer:
        pids = [pid for (pid,) in values(scorer, [asked("5", "pid", index=i) for i in range(6)], "f")]
        assert len(set(pids)) <= 2
        ((child,),) = values(scorer, [asked("5", "child")], "f")
        assert alive(child)
        scorer.close()
        assert wait_gone([*pids, child])
        scorer.close()


def test_a_late_worker_takes_its_children_with_it(term):
    with scoring(term, timeout_s=0.5) as scorer:
        (values_of_group,) = values(scorer, [asked("5", "child")], "f")
        values(scorer, [asked("5", "spin")], "f")
        assert wait_gone(values_of_group)


def test_workers_die_with_a_trainer_that_is_killed(term, tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from grpo_cli.process.signals import Interrupted, Stop
from rewards import asked, reward_config, values
from grpo_cli.reward import make_scorer
scorer = make_scorer(reward_config({term!r}, workers=2))
groups = [asked("5", "pid", index=i) for i in range(4)]
print(*{{pid for (pid,) in values(scorer, groups, "f")}}, flush=True)
scorer.score([asked("5", "spin")])
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [float(pid) for pid in trainer.stdout.readline().split()]
    assert pids
    assert all(map(alive, pids))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert wait_gone(pids)


def test_workers_have_no_input_no_keys_and_no_launcher(term, monkeypatch):
    for name in ("GRPO_SERVER_KEY", "WANDB_API_KEY", "HF_TOKEN", "RANK", "MASTER_ADDR", "OTHER_KEY"):
        monkeypatch.setenv(name, "1")
    with scoring(term) as scorer:
        assert values(scorer, [asked("5", "stdin", "secrets", "other")], "f") == [[0.0, 0.0, 1.0]]
    environment = Job("math", {}, None).environment()
    assert not {"WANDB_API_KEY", "HF_TOKEN", "RANK", "OTHER_KEY"} & set(environment)
    assert environment["PATH"] == os.environ["PATH"]


def test_memory_is_limited(tmp_path):
    term = python_term(tmp_path, "def f(completions): return [len(bytearray(8 << 30))]")
    options = {"path": term["path"], "function": "f"}
    pool = Pool("f", Job("python", options, 1 << 30), workers=1, timeout_s=20.0)
    try:
        (reply,) = pool.run([({"completions": ["x"]}, 1)])
    finally:
        pool.close()
    assert isinstance(reply, Failure)
    assert reply.kind == "error"
    assert reply.reason.startswith("MemoryError")


def test_a_pattern_that_takes_for_ever_is_unscored():
    with scoring({"name": "regex", "pattern": "(a+)+$"}, timeout_s=0.5) as scorer:
        (got,) = values(scorer, [asked(None, "a", "a" * 60 + "b", "b")], "regex")
    assert got == [1.0, None, 0.0]


def test_large_requests_pass(tmp_path):
    term = python_term(tmp_path, "def f(completions): return [len(text) for text in completions]")
    with scoring(term) as scorer:
        assert values(scorer, [asked("5", "x" * 3_000_000, "é" * 2_000_000)], "f") == [[3e6, 2e6]]


def test_workers_work_at_the_same_time(tmp_path):
    """The first group waits for what the second one writes."""
    source = f"""
import pathlib, time
flag = pathlib.Path({str(tmp_path / "flag")!r})
def f(completions):
    if completions == ["write"]:
        flag.touch()
    while not flag.exists():
        time.sleep(0.01)
    return [1.0]
"""
    with scoring(python_term(tmp_path, source), workers=2) as scorer:
        groups = [asked("5", "wait"), asked("5", "write", index=1)]
        assert values(scorer, groups, "f") == [[1.0], [1.0]]
