"""What is in the run directory already, and the checkpoint that the run would go on from."""

from __future__ import annotations

import os

from grpo_cli.checkpoint import resume
from grpo_cli.checks.start.report import Report
from grpo_cli.errors import RunError
from grpo_cli.files.rundir import RunDir
from grpo_cli.schema import Config


def check(cfg: Config, report: Report, fingerprint: str | None = None) -> None:
    """The rules on an earlier run in `run.dir`, and those of resuming. `fingerprint` is the training rows' hash."""
    _check_fresh(cfg, report)
    try:
        report.take(resume.findings(cfg, fingerprint))
    except RunError as error:
        report.add("resume_checkpoint_complete", f"The checkpoint cannot be read: {error}", "an older checkpoint")


def _check_fresh(cfg: Config, report: Report) -> None:
    run_dir = RunDir(cfg.run.dir)
    owner = run_dir.owner()
    another_node = owner is not None and cfg.trainer.nnodes > 1 and owner.get("host") != os.uname().nodename
    if owner is not None and not another_node:
        report.add(
            "run_dir_is_fresh",
            f"run.dir={run_dir.path} belongs to a run that is alive (process {owner.get('pid', '?')} on "
            f"{owner.get('host', '?')}).",
            "another run.dir, or wait until that run has ended",
        )
    elif cfg.trainer.resume == resume.NEVER and run_dir.state_path.exists():
        report.add(
            "run_dir_is_fresh",
            f"run.dir={run_dir.path} holds a run already, and trainer.resume=never would overwrite it.",
            {"trainer.resume": resume.AUTO},
            "another run.dir",
            keys=("trainer.resume", "run.dir", "run.name"),
        )
