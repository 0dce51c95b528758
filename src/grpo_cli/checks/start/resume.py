"""What is in the run directory already, and the checkpoint that the run would go on from."""

from __future__ import annotations

from grpo_cli import resume
from grpo_cli.checks.start.report import Report
from grpo_cli.rundir import RunDir
from grpo_cli.schema import Config


def check(cfg: Config, report: Report) -> None:
    """The rules on an earlier run in `run.dir`, and those of resuming."""
    run_dir = RunDir(cfg.run.dir)
    owner = run_dir.owner()
    if owner is not None:
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
            "another run.dir",
            {"trainer.resume": resume.AUTO},
        )
    report.take(resume.findings(cfg))
