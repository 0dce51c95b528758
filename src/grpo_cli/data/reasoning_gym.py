"""Procedural tasks of the package reasoning-gym (optional extra)."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from grpo_cli.data.columns import Columns
from grpo_cli.data.rows import Bad, Row
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.schema import ReasoningGymData
from grpo_cli.seeds import derive_seed

EVAL_SEED = 2**33
"""Row i of a task has seed base + i. Training bases are below 2**32, so no held-out row is ever a training row."""


class ReasoningGymRows:
    """`train_size` or `eval_size` rows of one task, made when they are read. Raises ConfigError for an unknown task."""

    def __init__(self, cfg: ReasoningGymData, split: str, seed: int):
        findings = check_task(cfg)
        if findings:
            raise ConfigError(findings)
        import reasoning_gym

        base = EVAL_SEED if split == "eval" else derive_seed(seed, "reasoning_gym", cfg.task) % 2**31
        size = cfg.eval_size if split == "eval" else cfg.train_size
        self.name = f"{cfg.task} {split}"
        self._identity = f"{reasoning_gym.__version__} {cfg.task} {base} {size}"
        self._entries = reasoning_gym.create_dataset(cfg.task, seed=base, size=size) if size else []
        self._columns = Columns("question", None)

    def scan(self) -> Iterator[Row | list[Bad]]:
        for index in range(len(self)):
            yield self._read(index)

    def row(self, index: int) -> Row:
        row = self._read(index)
        assert isinstance(row, Row), row
        return row

    def __len__(self) -> int:
        return len(self._entries)

    def fingerprint(self) -> str:
        return hashlib.sha256(self._identity.encode()).hexdigest()

    def _read(self, index: int) -> Row | list[Bad]:
        entry: dict[str, Any] = self._entries[index]
        row = self._columns.read(entry, f"{self.name} row {index}")
        if isinstance(row, Row) and entry.get("answer") is not None:
            return Row(row.prompt, str(entry["answer"]), entry, row.source)
        return row


def check_task(cfg: ReasoningGymData) -> list[Finding]:
    """The package that is missing, or a task that it does not have."""
    if importlib.util.find_spec("reasoning_gym") is None:
        message = "data.name=reasoning_gym needs the package reasoning-gym, which is not installed."
        return [Finding("data_file_readable", ("data.name",), message, "pip install 'grpo[reasoning_gym]'")]
    from reasoning_gym.factory import DATASETS

    if cfg.task in DATASETS:
        return []
    import difflib

    near = difflib.get_close_matches(cfg.task, DATASETS, n=3) or sorted(DATASETS)[:3]
    message = f"reasoning-gym has no task {cfg.task!r}; it has {len(DATASETS)} others."
    return [Finding("choice_known", ("data.task",), message, f"data.task={near[0]}")]
