"""`grpo train -m`: every combination of the swept values is a job with processes and a run directory of its own.

Job n runs in `<its run.dir>/<n>`; all jobs share one time stamp. Jobs run one after the other, and one that fails or is
invalid stops none of the others: its run.json says why, and the closing summary lists it. A signal ends the sweep.

Exit code: 128 + N after signal N; 0 where every job is done; 2 where wrong configs or data are the only failures; else
that of the first job that failed while running.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_cli.compose import Loaded, bad_config_dir, load
from grpo_cli.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    GuardStop,
    RunError,
    exit_code_of,
    signal_exit_code,
)
from grpo_cli.files.rundir import RunDir
from grpo_cli.options import conf_dir, read_groups
from grpo_cli.overrides import jobs
from grpo_cli.terminal.interrupt import SignalExit, signals_exit
from grpo_cli.terminal.output import say
from grpo_cli.terminal.parser import one_line, show
from grpo_cli.train import run

_SIGNALS_TO_THE_SWEEP = (129, 130, 143)
"""Exit codes of a job that was told to stop by a hang-up, Ctrl-C or SIGTERM: whoever sent it means the whole sweep."""


@dataclass(slots=True)
class Job:
    """One combination of the swept values."""

    number: int
    swept: str
    """The overrides in which it differs from the other jobs, as typed."""
    loaded: Loaded
    directory: Path
    exit_code: int | None = None
    reason: str | None = None


def sweep(overrides: Sequence[str], config_dir: Path | None = None) -> int:
    """Runs all jobs; raises ConfigError where the sweep itself is mistyped, before any job."""
    if problem := bad_config_dir(config_dir):
        raise ConfigError(problem)
    groups = read_groups([conf_dir(), *([config_dir] if config_dir else [])])
    combinations, findings = jobs(overrides, groups)
    if findings:
        raise ConfigError(findings)
    now = datetime.now()
    swept = [index for index in range(len(overrides)) if len({job[index] for job in combinations}) > 1]
    planned = [
        _plan(number, job, [job[index] for index in swept], config_dir, now) for number, job in enumerate(combinations)
    ]
    say(f"Sweep of {len(planned)} jobs:", sys.stdout)
    for job in planned:
        verdict = f"  ({len(job.loaded.errors)} errors: will not run)" if job.loaded.errors else ""
        say(f"  {job.number}: {job.swept} -> {job.directory}{verdict}", sys.stdout)
    with signals_exit():  # while workers run, their launcher handles signals
        try:
            for job in planned:
                say(f"Job {job.number} ({job.number + 1} of {len(planned)}): {job.swept}", sys.stdout)
                _run(job)
                if job.exit_code in _SIGNALS_TO_THE_SWEEP:
                    break
        finally:
            _summarise(planned)
    return exit_code(planned)


def _plan(number: int, overrides: list[str], swept: list[str], config_dir: Path | None, now: datetime) -> Job:
    loaded = load(overrides, "train", config_dir, now)
    directory = (loaded.resolved or {}).get("run", {}).get("dir")
    if not isinstance(directory, str):
        directory = str(Path.cwd() / "runs" / now.strftime("%Y-%m-%d_%H-%M-%S"))
    directory = str(Path(directory) / str(number))
    if loaded.config is not None and loaded.resolved is not None:
        loaded.resolved["run"] = {**loaded.resolved["run"], "dir": directory}
        loaded.config = loaded.config.model_copy(
            update={"run": loaded.config.run.model_copy(update={"dir": directory})}
        )
    return Job(number, " ".join(swept) or "(no swept key)", loaded, Path(directory))


def _run(job: Job) -> None:
    """Runs one job, whatever comes of it; a job that its launcher did not see to the end gets its run.json here."""
    before = RunDir(job.directory).attempt()
    try:
        job.exit_code = run(job.loaded)
        job.reason = RunDir(job.directory).state().get("reason")
        return
    except ConfigError as error:
        show(error.findings)
        job.exit_code, job.reason = EXIT_USAGE, " ".join(finding.line() for finding in error.findings)
    except (RunError, GuardStop) as error:
        job.exit_code, job.reason = exit_code_of(error), str(error)
        say(f"error: {one_line(job.reason)}")
    except SignalExit as stop:
        job.exit_code = signal_exit_code(stop.signum)
        job.reason = f"Stopped by {signal.Signals(stop.signum).name} before its workers started."
    except Exception as error:  # a mistake of ours, which must not cost the other jobs
        say(traceback.format_exc())
        job.exit_code, job.reason = EXIT_FAILED, f"{type(error).__name__}: {error}"
    _record(job, before)


def _record(job: Job, before: tuple[str, ...]) -> None:
    """The last word of a job in its run.json; `before` is the attempt that was there when the job came.

    An earlier run there, done or to be resumed, is left alone, as `grpo train` does. An unwritable directory is told by
    the summary alone.
    """
    try:
        run_dir = RunDir.create(job.directory)
        if run_dir.owner() is not None:
            return
        begun = run_dir.attempt() != before
        ours = ("starting", "running") if begun else (None, "refused")
        if run_dir.state().get("status") not in ours:
            return
        if not begun:
            config: Any = job.loaded.config
            steps = config.trainer.steps if config else None
            run_dir.begin(seed=config.run.seed if config else 0, steps=steps)
        run_dir.end(job.exit_code or EXIT_FAILED, job.reason)
    except (ConfigError, RunError, OSError) as error:
        say(f"{job.directory}/run.json was not written: {error}")


def _summarise(planned: Sequence[Job]) -> None:
    """The last lines of a sweep: how many jobs are done, and every one that is not."""
    done = sum(job.exit_code == EXIT_OK for job in planned)
    say(f"Sweep: {done} of {len(planned)} jobs done.", sys.stdout)
    for job in planned:
        if job.exit_code is None:
            say(f"  not started: {job.number}: {job.swept}", sys.stdout)
        elif job.exit_code != EXIT_OK:
            reason = one_line(job.reason or "no reason was recorded")
            say(f"  exit {job.exit_code}: {job.number}: {job.swept} ({job.directory}): {reason}", sys.stdout)


def exit_code(planned: Sequence[Job]) -> int:
    """Of the whole sweep, as the head of this file says."""
    codes = [job.exit_code for job in planned if job.exit_code]
    told = [code for code in codes if code in _SIGNALS_TO_THE_SWEEP]
    failed = [code for code in codes if code != EXIT_USAGE]
    return [*told, *failed, *codes, EXIT_OK][0]
