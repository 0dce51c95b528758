"""Findings at run start, in the same form as those of the config: the fix completed on this config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from grpo_cli.checks.engine import RULES, Changes
from grpo_cli.checks.run import completed
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.schema import Config


class Report:
    """Collects findings; one mistake that several checks meet is told once."""

    def __init__(self, cfg: Config, command: str = "train"):
        self.cfg = cfg
        self.command = command
        self.findings: list[Finding] = []

    def add(self, rule: str, message: str, *fixes: Mapping[str, Any] | str, keys: Iterable[str] = ()) -> None:
        """A finding of `rule`; a fix is changes, completed with all that must go with them, or words to act on."""
        texts = [fix if isinstance(fix, str) else completed(self.cfg, Changes(fix), self.command) for fix in fixes]
        entry = RULES[rule]
        self.take([Finding(rule, tuple(keys) or entry.keys, message, ", or ".join(texts), entry.severity)])

    def take(self, findings: Iterable[Finding]) -> None:
        """Findings that another module made; those that were told already are left out."""
        self.findings += [finding for finding in findings if finding not in self.findings]

    def take_error(self, error: ConfigError) -> None:
        self.take(error.findings)
