"""Whole runs in the process of the tests: the worker without its launcher, so that one costs half a second.

The launcher, exit codes of processes and real signals have their own tests (test_launch.py, test_worker.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_cli.compose import load
from grpo_cli.errors import EXIT_OK, SignalStop, exit_code_of
from grpo_cli.files.jsonio import read_rows
from grpo_cli.files.rundir import RunDir
from grpo_cli.process.signals import Interrupted, stop
from grpo_cli.worker import work

TINY = (
    *("+experiment=smoke", "trainer.prompts_per_step=2", "rollout.num_generations=4", "rollout.max_new_tokens=4"),
    "logger.console=plain",
)


def execute(resolved: dict[str, Any], directory: Path) -> int:
    """What the launcher does for one rank: config.yaml, run.json, the worker; returns the run's exit code."""
    home = RunDir.create(directory)
    home.write_config(resolved)
    home.begin(seed=resolved["run"]["seed"], steps=resolved["trainer"]["steps"])
    try:
        reason, code = work(home), EXIT_OK
    except Exception as error:
        error = SignalStop(stop.signum) if isinstance(error, Interrupted) else error
        reason, code = str(error), exit_code_of(error)
    finally:
        stop.__init__()
    home.end(code, reason)
    return code


def train(directory: Path, *overrides: str) -> int:
    """Exit code of one run of the tiny model in `directory`."""
    loaded = load([*TINY, f"run.dir={directory}", *overrides], "train")
    loaded.require()
    assert loaded.resolved is not None  # with absolute paths
    return execute(loaded.resolved, directory)


def metrics(directory: Path) -> list[dict]:
    return list(read_rows(directory / "metrics.jsonl"))


def state(directory: Path) -> dict:
    return json.loads((directory / "run.json").read_text())


def groups(directory: Path) -> list[dict]:
    """Every dumped group, in the order of the steps."""
    return [group for path in sorted((directory / "rollouts").iterdir()) for group in read_rows(path)]


class StageFile:
    """Stands in for the file in which a rank tells its stage; calls `at(step, stage)` when one begins."""

    rank = 0

    def __init__(self, at: Callable[[int, str], None]):
        self._at = at

    def beat(self, step: int, stage: str) -> None:
        self._at(step, stage)

    def alive(self) -> None: ...

    def wants_stop(self, signum: int) -> None: ...


class FakeWandb:
    """Stands in for the wandb module; `runs` are the runs that init made, with their rows and their ends."""

    __spec__ = ModuleSpec("wandb", None)  # other packages ask whether wandb is installed

    def __init__(self) -> None:
        self.runs: list[SimpleNamespace] = []

    def init(self, **options: Any) -> SimpleNamespace:
        run = SimpleNamespace(options=options, rows=[], ends=[])
        run.log = lambda row, step: run.rows.append((step, row))
        run.finish = lambda exit_code: run.ends.append(exit_code)
        self.runs.append(run)
        return run

    def install(self, monkeypatch: Any) -> FakeWandb:
        monkeypatch.setitem(sys.modules, "wandb", self)
        return self
