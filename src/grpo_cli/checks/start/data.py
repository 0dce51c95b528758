"""Rows, prompts and answers, with the tokenizer where there is one, and what the reward reads of them."""

from __future__ import annotations

from typing import Any

from grpo_cli.checks.start.report import Report
from grpo_cli.data import inspect
from grpo_cli.reward.check import RewardCheck
from grpo_cli.schema import Config


def check(cfg: Config, tokenizer: Any | None, report: Report) -> None:
    """Every rule on the data and on what the reward reads of them; without a tokenizer those that need none."""
    reward = RewardCheck(cfg)
    report.take(inspect(cfg, tokenizer, reward.see))
    report.take(reward.findings())
