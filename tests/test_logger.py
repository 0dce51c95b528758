"""One row a step, everywhere the same, with a scripted wandb module."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configs import make_config

from grpo_cli.errors import RunError
from grpo_cli.files.rundir import RunDir
from grpo_cli.logger import Logger
from grpo_cli.terminal.console import Clock, Plain, duration, fields, make_console


class FakeWandb:
    """Records the calls; `runs` are the runs that init made."""

    def __init__(self) -> None:
        self.runs: list[SimpleNamespace] = []
        self.fail_init = self.fail_log = False

    def init(self, **options: Any) -> SimpleNamespace:
        if self.fail_init:
            raise ValueError("no network")
        run = SimpleNamespace(options=options, rows=[], finished=[], step=0)

        def log(row: dict, step: int) -> None:
            if self.fail_log:
                raise ValueError("connection lost")
            run.rows.append((step, row))

        run.log = log
        run.finish = lambda exit_code: run.finished.append(exit_code)
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.begin(seed=1, steps=4)
    return run_dir


def rows(run_dir: RunDir) -> list[dict]:
    found = [json.loads(line) for line in run_dir.metrics_path.read_text().splitlines()]
    assert all(row.pop("time/step") >= 0 for row in found)
    return found


def logger(run_dir: RunDir, mode: str = "disabled", console: str = "off", **options: Any) -> Logger:
    cfg = make_config(f"logger.wandb.mode={mode}", f"logger.console={console}", "run.name=demo")
    return Logger(cfg, run_dir, **options)


def test_every_step_is_one_row_and_a_nan_is_null(run_dir: RunDir) -> None:
    log = logger(run_dir, steps=2)
    log.log(1, {"reward": 0.5, "loss": float("nan")})
    log.log(2, {"reward": 0.75, "groups/dropped_count": 8})
    log.close(0)
    assert rows(run_dir) == [
        {"step": 1, "reward": 0.5, "loss": None},
        {"step": 2, "reward": 0.75, "groups/dropped_count": 8},
    ]
    assert run_dir.state()["step"] == 2
    assert run_dir.state()["wandb"] is None


def test_a_step_cannot_go_back(run_dir: RunDir) -> None:
    log = logger(run_dir, start_step=5)
    with pytest.raises(AssertionError, match="one row a step"):
        log.log(5, {})


def test_other_ranks_write_nothing(run_dir: RunDir, wandb: FakeWandb) -> None:
    log = logger(run_dir, "offline", is_main=False)
    log.log(1, {"reward": 0.5})
    log.close(0)
    assert not run_dir.metrics_path.exists()
    assert not wandb.runs


def test_resumed_wandb_run_keeps_its_id_and_gets_no_step_twice(run_dir: RunDir, wandb: FakeWandb) -> None:
    first = logger(run_dir, "offline")
    for step in range(1, 9):
        first.log(step, {"reward": step / 10})
    # It is killed at 8; the checkpoint is that of step 5.
    run_dir.begin(seed=1, steps=10)
    run_dir.rewind(5)
    second = logger(run_dir, "offline", start_step=5)
    for step in range(6, 11):
        second.log(step, {"reward": step / 10})
    second.close(0)
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 11))
    sent = [step for run in wandb.runs for step, _ in run.rows]
    assert sent == list(range(1, 11))
    assert first.wandb_id == wandb.runs[1].options["id"] == wandb.runs[0].options["id"]
    assert wandb.runs[1].options["resume"] == "allow"
    assert wandb.runs[1].finished == [0]


def test_the_evaluation_before_training_is_sent_once(run_dir: RunDir, wandb: FakeWandb) -> None:
    for start in (-1, -1, 1):  # killed before step 1 was saved, then resumed from it
        log = logger(run_dir, "offline", start_step=start)
        for step in range(start + 1, 3):
            log.log(step, {"reward": step / 10})
        run_dir.begin(seed=1, steps=4)
    assert [[step for step, _ in run.rows] for run in wandb.runs] == [[0, 1, 2], [], []]


def test_server_that_knows_more_steps_is_believed(run_dir: RunDir, wandb: FakeWandb) -> None:
    log = logger(run_dir, "offline", start_step=5)
    log._wandb._sent = 7  # type: ignore[union-attr]
    log.log(6, {})
    log.log(8, {"reward": 1.0})
    assert [step for step, _ in wandb.runs[0].rows] == [8]


def test_each_run_directory_has_its_own_wandb_run(tmp_path: Path, wandb: FakeWandb) -> None:
    for name, code in (("a", 0), ("b", 1)):
        run_dir = RunDir.create(tmp_path / name)
        run_dir.begin(seed=1, steps=1)
        logger(run_dir, "offline").close(code)
    first, second = wandb.runs
    assert first.options["id"] != second.options["id"]
    assert (first.finished, second.finished) == ([0], [1])
    assert first.options["dir"] == str(tmp_path / "a")


def test_checkpoint_id_is_taken_where_run_json_has_none(run_dir: RunDir, wandb: FakeWandb) -> None:
    assert logger(run_dir, "offline", wandb_id="fromckpt").wandb_id == "fromckpt"


def test_wandb_that_fails_later_costs_a_warning(
    run_dir: RunDir, wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logger(run_dir, "online", console="plain", steps=3)
    wandb.fail_log = True
    log.log(1, {"reward": 0.5})
    log.log(2, {"reward": 0.5})
    log.close(0)
    assert capsys.readouterr().out.count("warning: W&B failed") == 1
    assert len(rows(run_dir)) == 2


def test_wandb_that_does_not_start_says_what_to_do(run_dir: RunDir, wandb: FakeWandb) -> None:
    wandb.fail_init = True
    with pytest.raises(RunError, match=r"logger.wandb.mode=offline"):
        logger(run_dir, "online")


def test_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console("auto", "demo", 4, 0)  # no terminal under pytest
    assert isinstance(console, Plain)
    console.step(
        1, {"reward": 0.5, "groups/trained_count": 6, "groups/dropped_count": 2, "rollout/tokens_per_s": 412.3}
    )
    assert capsys.readouterr().out.startswith("step 1/4  reward 0.500  kept/dropped 6/2  tokens/s 412  left 0:00:0")


def test_what_was_not_measured_is_not_shown() -> None:
    assert fields({"reward": None, "groups/dropped_count": 8}) == {}


def test_live_display_draws_the_last_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console("rich", "demo [bold]:smile:", 20, 0)
    for step in range(1, 11):
        console.step(step, {"reward": step / 100})
    console.note("checkpoint [written] \x1b[2J:smile:")
    console.close()
    out = capsys.readouterr().out
    assert "checkpoint [written] \\x1b[2J:smile:" in out
    assert "[bold]" in out  # a name is no markup
    assert "step 10/20" in out
    assert "0.030" in out
    assert "0.020" not in out  # eight rows


def test_reader_that_went_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    Plain(Clock(2, 0)).step(1, {})


def test_time_left_ignores_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    monkeypatch.setattr("time.time", lambda: -1e9)
    clock = Clock(10, 0)
    clock.tick(1)
    clock.tick(2)
    assert clock.seconds_left(2) == 16.0
    assert duration(3725) == "1:02:05"
    assert duration(None) == "–"


def test_the_evaluation_before_training_tells_nothing_about_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 50.0, 52.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    clock = Clock(10, 0)
    clock.tick(0)
    assert clock.seconds_left(0) is None
    clock.tick(1)
    assert clock.seconds_left(1) == 18.0  # nine steps of two seconds


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed here")
def test_the_real_wandb_offline_needs_no_key_no_terminal_and_goes_on_under_its_id(tmp_path: Path) -> None:
    """Cases J01 and J06: an empty home, no standard input; each piece is a folder of its own, of one run."""
    script = """
import sys
from configs import make_config
from grpo_cli.logger import Logger
from grpo_cli.files.rundir import RunDir
home = RunDir.create(sys.argv[1])
for steps, code in (([1, 2], 1), ([3], 0)):
    home.begin(seed=0, steps=3)
    log = Logger(make_config("logger.wandb.mode=offline", "logger.console=off"), home, start_step=steps[0] - 1)
    for step in steps:
        log.log(step, {"reward": 0.5})
    log.close(code)
"""
    places = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "PYTHONPATH": places}
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    run_dir = RunDir(tmp_path / "run")
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3]
    # The file bears the id alone; the folder's name also has the second of its start and, within one second, a number.
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.parent for file in files}) == 2
    assert {file.name for file in files} == {f"run-{run_dir.state()['wandb']['id']}.wandb"}
