"""What can be known before weights are loaded, but not from the config alone: data, tokenizer, model, devices, engine.

Heavy packages are imported inside, never with this module. Every check reports; none raises for what a user can get
wrong, so that a missing model hides no mistake in the data.
"""

from __future__ import annotations

from grpo_cli.checks.run import in_order
from grpo_cli.checks.start import data, devices, engine, model, resume, rundir, server
from grpo_cli.checks.start.report import Report
from grpo_cli.errors import Finding
from grpo_cli.schema import Config


def check(cfg: Config, command: str = "train") -> list[Finding]:
    """All findings at run start, in the order of the list of rules. `command` is train or eval.

    `eval` writes no run directory and resumes nothing; everything else is the same.
    """
    report = Report(cfg, command)
    tokenizer = model.check(cfg, report)
    fingerprint = data.check(cfg, tokenizer, report)
    devices.check(cfg, report)
    engine.check(cfg, report)
    server.check(cfg, report)
    if command == "train":
        rundir.check(cfg, report)
        resume.check(cfg, report, fingerprint)
    return in_order(report.findings)


def check_data(cfg: Config) -> list[Finding]:
    """Those on data, tokenizer and reward files: what `grpo validate --data` adds."""
    report = Report(cfg)
    tokenizer = model.read_tokenizer(cfg, report)
    data.check(cfg, tokenizer, report)
    return in_order(report.findings)
