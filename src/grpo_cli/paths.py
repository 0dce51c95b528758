"""Paths in a config: relative to where the command was typed, `~` is the home; afterwards absolute for good."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_BUILTIN = "builtin:"


def absolute(config: dict[str, Any], base: Path) -> dict[str, Any]:
    """A copy of a resolved config with absolute paths, so that it means the same from any working directory.

    What may be a hub id instead of a path (`model.path`, the rows of `data=hf`) is taken for a path where it starts
    with `/`, `.` or `~`, or exists below `base`. `data.chat_template` may be the text of a template. Values of another
    type, null and `???` stay as they are, for the schema to refuse.
    """
    changed = dict(config)
    _change(changed, "run", "dir", base, always=True)
    _change(changed, "model", "path", base, always=False)
    hub = (changed.get("data") or {}).get("name") == "hf" if isinstance(changed.get("data"), dict) else False
    for key in ("train", "eval"):
        _change(changed, "data", key, base, always=not hub)
    _change(changed, "data", "chat_template", base, always=False)
    if _text(changed, "trainer", "resume") not in ("auto", "never"):
        _change(changed, "trainer", "resume", base, always=True)
    reward = changed.get("reward")
    if isinstance(reward, dict) and isinstance(reward.get("terms"), list):
        changed["reward"] = {**reward, "terms": [_absolute_term(term, base) for term in reward["terms"]]}
    return changed


def _absolute_term(term: Any, base: Path) -> Any:
    if isinstance(term, dict) and term.get("name") == "python" and isinstance(term.get("path"), str):
        return {**term, "path": _absolute(term["path"], base)}
    return term


def _text(config: dict[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _change(config: dict[str, Any], section: str, key: str, base: Path, *, always: bool) -> None:
    value = _text(config, section, key)
    if not isinstance(value, str) or value.startswith(_BUILTIN) or "\n" in value:
        return
    if always or value.startswith(("/", "./", "../", "~")) or value in (".", "..") or (value and _exists(base / value)):
        config[section] = {**config[section], key: _absolute(value, base)}


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than a path can be: the text of a template
        return False


def _absolute(value: str, base: Path) -> str:
    if value in ("", "???"):
        return value
    return os.path.normpath(base / os.path.expanduser(value))
