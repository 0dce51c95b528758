"""JSON Lines: one object a line, UTF-8. Rows stay on disk; memory holds two numbers a row."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_cli.data.columns import Columns
from grpo_cli.data.rows import Bad, Row
from grpo_cli.errors import RunError

BOM = b"\xef\xbb\xbf"


class JsonlRows:
    """The rows of one file. A BOM, CRLF, blank lines and a missing last newline are fine."""

    def __init__(self, path: str, columns: Columns):
        self.path = Path(path)
        self.columns = columns
        self._keys = [key for key in (columns.prompt_key, columns.answer_key) if key is not None]
        self._offsets = array("Q")
        self._lines = array("Q")
        self._file = open_regular(self.path)
        self._hash = hashlib.sha256()

    def scan(self) -> Iterator[Row | list[Bad]]:
        offset = 0
        for number, line in enumerate(self._file, start=1):
            self._hash.update(line)
            start, offset = offset, offset + len(line)
            if number == 1 and line.startswith(BOM):
                line = line[len(BOM) :]
                start += len(BOM)
            if not line.strip(b" \t\r\n"):
                continue
            self._offsets.append(start)
            self._lines.append(number)
            yield self._read(line, number)

    def row(self, index: int) -> Row:
        self._file.seek(self._offsets[index])
        row = self._read(self._file.readline(), self._lines[index])
        if not isinstance(row, Row):
            raise RunError(f"{self.source(self._lines[index])} has changed since the run began: {row[0].reason}.")
        return row

    def __len__(self) -> int:
        return len(self._offsets)

    def fingerprint(self) -> str:
        return self._hash.hexdigest()

    def source(self, number: int) -> str:
        return f"{self.path}:{number}"

    def _read(self, line: bytes, number: int) -> Row | list[Bad]:
        try:
            columns = decode_object(line)
        except ValueError as error:
            return [Bad("data_rows_valid", self.source(number), str(error))]
        keys = [key for key in self._keys if isinstance(columns.get(key), float)]
        if keys:
            written = decode_object(line, parse_float=str)
            columns.update({key: written[key] for key in keys})  # 3.10 is the answer "3.10", not "3.1"
        return self.columns.read(columns, self.source(number))


def open_regular(path: Path) -> Any:
    """The open file; OSError also for a directory, pipe or device, which cannot be read twice."""
    file = path.open("rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object hook for `json`: ValueError where a key stands twice, of which Python would keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_constant)


def decode_object(line: bytes, parse_float: Any = None) -> dict[str, Any]:
    """The JSON object of one line; ValueError with the reason for anything else, NaN and lone surrogates included."""
    decoder = _DECODER
    if parse_float is not None:
        decoder = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_constant, parse_float=parse_float)
    try:
        found = decoder.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"not a JSON object but {_name(found)}")
    if b"\\u" in line:
        _refuse_lone_surrogates(found)
    return found


def _refuse_lone_surrogates(found: dict[str, Any]) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a lone surrogate (U+{ord(error.object[error.start]):04X}), which is no character") from error


def _name(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
