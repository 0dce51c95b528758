"""Files that a machine reads after a crash: strict JSON, whole or not there at all."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_cli.errors import RunError


def dumps(value: Any) -> str:
    """One line of strict JSON: ASCII (so lone surrogates survive), NaN and infinities as null.

    >>> dumps({"loss": float("nan")})
    '{"loss": null}'
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_failed(path: Path, error: OSError) -> RunError:
    """The error of a failed write, in one line that says which file and why."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"The disk is full: {path} could not be written. Free some space and start again to resume.")
    return RunError(f"{path} could not be written: {error.strerror or error}.")


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable, where the file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace `path` by `lines`: written aside, fsynced, renamed. Raises RunError; then the old file is still there."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            with open(aside, "w", encoding="utf-8") as file:
                for line in lines:
                    file.write(line)
                    file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            fsync_dir(path.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise write_failed(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as strict JSON, atomically."""
    write_lines(path, [dumps(value)])


def append_line(path: Path, line: str) -> None:
    """Append one line durably; where that fails nothing of it stays, and RunError is raised."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise write_failed(path, error) from error
    try:
        before = os.fstat(fd).st_size
        data = (line + "\n").encode("utf-8")
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        except OSError as error:
            os.ftruncate(fd, before)
            raise write_failed(path, error) from error
    finally:
        os.close(fd)


def read_json(path: Path) -> Any:
    """The value in `path`; None where the file is missing or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_rows(path: Path) -> list[dict]:
    """The JSON objects of a file of lines; lines that are none (the machine died in the last one) are left out."""
    rows = []
    try:
        with open(path, "rb") as file:  # a line with a broken byte is no JSON, either
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    rows.append(row)
    except FileNotFoundError:
        pass
    return rows
