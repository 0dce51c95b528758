"""What every reader hands over: rows with a prompt, perhaps an answer, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from grpo_cli.errors import Finding

SHOWN = 20
"""Bad rows that a finding lists; the others are counted."""

Chat = list[dict[str, Any]]


class Row(NamedTuple):
    """One usable row. `prompt` is text or a chat list; `source` is `file:line`, or a generator's name and an index."""

    prompt: str | Chat
    answer: str | None
    columns: Mapping[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class Bad:
    """A row that cannot be used: the rule that it breaks, where it is, and why."""

    rule: str
    source: str
    reason: str


class Rows(Protocol):
    """Random access to rows that `scan` has read once."""

    def scan(self) -> Iterator[Row | list[Bad]]:
        """Every row in order: what it holds, or all that is wrong with it. After that, `row` works."""

    def row(self, index: int) -> Row:
        """Row `index` (0-based, blank lines not counted); it was a Row when it was scanned."""

    def __len__(self) -> int:
        """Rows that `scan` has met."""

    def fingerprint(self) -> str:
        """Hash of the content that `scan` has met: equal for two files of the same bytes, whatever their names."""


@dataclass
class Problems:
    """Findings that many rows share: the first twenty are named, all are counted."""

    key: str
    """The config key whose rows these are: data.train or data.eval."""
    shown: dict[str, list[str]] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def add(self, bad: Bad) -> None:
        self.count[bad.rule] = self.count.get(bad.rule, 0) + 1
        shown = self.shown.setdefault(bad.rule, [])
        if len(shown) < SHOWN:
            shown.append(f"{bad.source}: {bad.reason}")

    def findings(self, rules: Mapping[str, Rule]) -> list[Finding]:
        """One finding a rule, in the order of `rules`."""
        return [self._finding(name, rule) for name, rule in rules.items() if name in self.count]

    def _finding(self, name: str, rule: Rule) -> Finding:
        total, shown = self.count[name], self.shown[name]
        more = f"; and {total - len(shown)} more" if total > len(shown) else ""
        rows = "1 row" if total == 1 else f"{total} rows"
        message = f"{rows} of {self.key} {rule.what}: {'; '.join(shown)}{more}"
        return Finding(name, (*rule.keys, self.key), message, rule.fix, rule.severity)


@dataclass(frozen=True, slots=True)
class Rule:
    """How the finding of a row rule reads: `N rows of KEY {what}: …`."""

    what: str
    fix: str
    keys: tuple[str, ...] = ()
    severity: Any = "error"
