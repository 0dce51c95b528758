"""Rows, prompts and answers, with the tokenizer where there is one, and what the reward reads of them."""

from __future__ import annotations

from typing import Any

from grpo_cli.checks.start.report import Report
from grpo_cli.data import inspect_rows
from grpo_cli.data.check import error_findings
from grpo_cli.reward.check import RewardCheck
from grpo_cli.schema import Config


def check(cfg: Config, tokenizer: Any | None, report: Report) -> str | None:
    """Every rule on the data and on what the reward reads of them; without a tokenizer those that need none.

    Returns the hash of the training rows, where they could be read.
    """
    reward = RewardCheck(cfg)
    rows = inspect_rows(cfg, tokenizer, reward.see, reward.reads_answer, report.command)
    report.take(rows.findings)
    report.take(reward.findings())
    return rows.train.fingerprint() if rows.train is not None and not error_findings(rows.findings) else None
