"""What became of every prompt, one line a step: RUN_DIR/ledger.jsonl. `grpo status` adds it up.

    {"step": 3, "drawn": 24, "rows": 100, "total": 200, "trained": ["row-7"], "dropped": {"zero_std": ["row-2"],
    "stale": []}}

`drawn` counts the prompts that the data cursor had given out by then, over all epochs; those without a fate yet are
pending (carried, or being generated). `rows` and `total` are the prompts of one epoch and of the whole run (null: no
end).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.files.rundir import RunDir
from grpo_cli.types import Group

TRAINED = "trained"


def append(run_dir: RunDir, step: int, kept: Sequence[Group], dropped: Sequence[Group], data: Any) -> None:
    """Write down the fates that `step` decided. `data` is the `Data` that gave out the prompts. Raises RunError."""
    reasons: dict[str, list[str]] = {}
    for group in dropped:
        assert group.dropped is not None, group.group_id
        reasons.setdefault(group.dropped, []).append(group.prompt.prompt_id)
    run_dir.append_ledger(
        {
            "step": step,
            "drawn": data.state()["consumed"],
            "rows": data.train_rows,
            "total": data.total,
            "trained": [group.prompt.prompt_id for group in kept],
            "dropped": reasons,
        }
    )


@dataclass(slots=True)
class Fates:
    """Sums of a ledger. Every drawn prompt has exactly one fate, or is pending."""

    counts: Counter[str] = field(default_factory=Counter)
    """Fate -> prompts, each counted once an epoch: `trained`, or the reason of a drop."""
    times: Counter[str] = field(default_factory=Counter)
    """Prompt id -> how often it got a fate."""
    steps: int = 0
    drawn: int = 0
    rows: int | None = None
    total: int | None = None

    @property
    def decided(self) -> int:
        return sum(self.counts.values())

    @property
    def pending(self) -> int:
        """Prompts that were drawn and have no fate yet."""
        return self.drawn - self.decided

    @property
    def epochs(self) -> float | None:
        """Passes over the prompts so far, by prompts drawn; None where the number of rows is not known."""
        return self.drawn / self.rows if self.rows else None

    def faults(self) -> list[str]:
        """Where the ledger contradicts itself; empty for an honest one."""
        found = []
        if self.pending < 0:
            found.append(f"{self.decided} prompts have a fate, but only {self.drawn} were drawn")
        if self.rows and self.times:
            passes = -(-self.drawn // self.rows)  # begun epochs: nobody can have been drawn more often
            often = [prompt for prompt, times in self.times.items() if times > passes]
            if often:
                found.append(f"{len(often)} prompts came more often than there were epochs, for example {often[0]}")
        return found


def add_up(rows: Iterable[Mapping[str, Any]]) -> Fates:
    """The sums of the ledger's lines."""
    fates = Fates()
    for row in rows:
        by_fate = {TRAINED: row["trained"], **row["dropped"]}
        for fate, prompts in by_fate.items():
            fates.counts[fate] += len(prompts)
            fates.times.update(prompts)
        fates.steps += 1
        fates.drawn, fates.rows, fates.total = row["drawn"], row["rows"], row["total"]
    return fates
