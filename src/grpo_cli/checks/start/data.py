"""Rows, prompts and answers, with the tokenizer where there is one, and what the reward reads of them."""

from __future__ import annotations

from typing import Any

from grpo_cli.checks.start.report import Report
from grpo_cli.data import inspect
from grpo_cli.schema import Config


def check(cfg: Config, tokenizer: Any | None, report: Report) -> None:
    """Every rule on the data; without a tokenizer those that need none."""
    report.take(inspect(cfg, tokenizer))
