"""Data sets of plain files from the Hugging Face hub, or local folders in their layout (optional extra `datasets`)."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_cli.data.columns import Columns
from grpo_cli.data.rows import Bad, Row
from grpo_cli.errors import ConfigError, Finding


class HfRows:
    """One split of a data set; Arrow files on disk, rows read when asked for.

    `name` is `ID`, `ID:SPLIT` or `ID:CONFIG:SPLIT`, where ID is a hub id or a local folder. Loading scripts are
    refused.
    """

    def __init__(self, name: str, split: str, key: str, columns: Columns):
        self.name = name
        self.columns = columns
        self._hash = hashlib.sha256()
        identity, config, chosen = parse_name(name, split)
        findings = check_plain(identity, key)
        if findings:
            raise ConfigError(findings)
        import datasets

        try:
            self._table: Any = datasets.load_dataset(identity, config, split=chosen)
        except Exception as error:  # the package raises a dozen kinds; for a user all say: this name, this reason
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            message = f"{key}={name} cannot be loaded: {reason}"
            fix = f"{key}=ID:SPLIT or {key}=ID:CONFIG:SPLIT of a data set of plain files (this took split {chosen!r})"
            raise ConfigError(Finding("data_file_readable", (key,), message, fix)) from error

    def scan(self) -> Iterator[Row | list[Bad]]:
        for index, columns in enumerate(self._table):
            # The package's own fingerprint also depends on where its cache lies.
            self._hash.update(repr(sorted(columns.items(), key=str)).encode("utf-8", "surrogatepass"))
            yield self.columns.read(columns, f"{self.name} row {index}")

    def row(self, index: int) -> Row:
        row = self.columns.read(self._table[index], f"{self.name} row {index}")
        assert isinstance(row, Row), row
        return row

    def __len__(self) -> int:
        return len(self._table)

    def fingerprint(self) -> str:
        return self._hash.hexdigest()


def parse_name(name: str, split: str) -> tuple[str, str | None, str]:
    """(id, config, split) of `ID`, `ID:SPLIT` or `ID:CONFIG:SPLIT`; `split` where the name has none.

    >>> parse_name("openai/gsm8k:main:test", "train")
    ('openai/gsm8k', 'main', 'test')
    >>> parse_name("some/set", "train")
    ('some/set', None, 'train')
    """
    parts = name.split(":")
    if len(parts) == 1 or Path(name).exists():
        return name, None, split
    if len(parts) == 2:
        return parts[0], None, parts[1]
    return ":".join(parts[:-2]), parts[-2], parts[-1]


def check_plain(identity: str, key: str) -> list[Finding]:
    """A loading script in a local folder, or the package that is missing. Runs nothing."""
    folder = Path(identity)
    if identity.endswith(".py") or (folder / f"{folder.resolve().name}.py").is_file():
        message = f"{key}={identity} has a loading script, which is code from the data set's author."
        fix = f"{key} of a data set of plain files (parquet, JSON Lines, CSV)"
        return [Finding("dataset_script_refused", (key,), message, fix)]
    if importlib.util.find_spec("datasets") is None:
        message = f"{key}={identity} cannot be opened: data.name=hf needs the package datasets, which is not installed."
        return [Finding("data_file_readable", (key, "data.name"), message, "pip install 'grpo[hf]'")]
    return []
