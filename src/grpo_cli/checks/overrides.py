"""Changes written as overrides, and overrides tried on a plain config: how a printed fix is made and proven.

The form of a `fix`: alternatives are separated by `, or `; within one, overrides are separated by spaces and quoted for
a shell where it needs it; words in round brackets at the end of an alternative explain it and are not part of it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from grpo_cli.checks.engine import REMOVE, Broken, Changes
from grpo_cli.checks.suggest import with_option
from grpo_cli.schema import Config

SEPARATOR = ", or "
MOST_ALTERNATIVES = 3
_BARE_TEXT = re.compile(r"[A-Za-z_/][\w./:@%+-]*|\.{0,2}/[\w./:@%+-]*", re.ASCII)
_READ_AS_OTHER_TYPES = {"null", "true", "false", "nan", "inf"}
_SHELL_SAFE = re.compile(r"[\w\[\],./:@%+=~-]*", re.ASCII)
Audit = Callable[[Mapping[str, Any]], Sequence[tuple[Broken, bool]]]
"""Everything that is found in a config, and whether it is an error."""


def render(value: Any) -> str:
    """A value as it is typed in an override.

    >>> render([0.9, None, "a b"])
    '[0.9,null,"a b"]'
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(render, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{render(child)}" for key, child in value.items()) + "}"
    return _text(value) if isinstance(value, str) else str(value)


def _number(value: float) -> str:
    """As people write them: 1e-06 becomes 1e-6, and 0.0003 becomes 3e-4."""
    text = f"{Decimal(repr(value)).normalize():E}" if 0 < abs(value) < 1e-3 else repr(value)
    return re.sub(r"e([+-])0+(\d)", r"e\1\2", text.lower()).replace("e+", "e")


def _text(value: str) -> str:
    if _BARE_TEXT.fullmatch(value) and value.lower() not in _READ_AS_OTHER_TYPES:
        return value
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f'"{escaped}{escaped[len(escaped) - trailing :]}"'


def write(changes: Mapping[str, Any], note: str = "") -> str:
    """One alternative of a fix."""
    words = []
    for key, value in changes.items():
        word = f"~{key}" if value is REMOVE else f"{key}={render(value)}"
        words.append(word if _SHELL_SAFE.fullmatch(word) else shlex.quote(word))
    return " ".join(words) + (f" ({note})" if note else "")


def read_first(fix: str) -> list[str]:
    """The overrides of the first alternative of a printed fix.

    >>> read_first("loss.clip_low=null loss.clip_high=null (off), or loss=ppo_clip")
    ['loss.clip_low=null', 'loss.clip_high=null']
    """
    alternative = fix.split(SEPARATOR)[0]
    return shlex.split(re.sub(r" \([^()]*\)$", "", alternative))


def apply(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a plain config with some keys set or removed; untouched parts are shared with the original.

    A group's own name chooses one of its options.
    """
    result: Any = dict(config)
    for key, value in changes.items():
        if key in Config.model_fields and isinstance(value, str):
            result[key] = with_option(result, key, value)
            continue
        *parents, leaf = key.split(".")
        node = result
        for part in parents:
            node = _own_child(node, part)
        _set(node, leaf, value)
    return result


def _own_child(node: Any, part: str) -> Any:
    """The child of a node that may be changed: copied, and made where there is none."""
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        child = node[int(part)]
        node[int(part)] = child = list(child) if isinstance(child, list) else dict(child or {})
        return child
    if not isinstance(node, dict):
        return {}
    child = node.get(part)
    node[part] = child = list(child) if isinstance(child, list) else dict(child) if isinstance(child, dict) else {}
    return child


def _set(node: Any, leaf: str, value: Any) -> None:
    if isinstance(node, list):
        if leaf.isdigit() and int(leaf) < len(node):
            node[int(leaf)] = value
    elif value is REMOVE:
        node.pop(leaf, None)
    else:
        node[leaf] = value


def complete_fix(
    config: Mapping[str, Any], found: Broken, before: Iterable[Broken], audit: Audit
) -> tuple[Changes, ...]:
    """The fixes of a finding, each with all that must change together, proven on this config.

    A fix is tried: the finding must be gone and no new error may have come. Where one has, that error's own fix is
    added and tried again. A fix that cannot be completed is left out; where none can, what is added may also replace
    a value of the fix itself. Without any, the first stays as it is.
    """
    known = {other.identity for other in before}
    for replaces in (False, True):
        proven: list[Changes] = []
        for fix in found.fixes:
            changes = _settle(config, dict(fix), found, known, audit, replaces, rounds=5)
            if changes is not None:
                proven.append(Changes(changes, fix.note))
            if len(proven) == MOST_ALTERNATIVES:
                break
        if proven:
            return tuple(proven)
    return found.fixes[:1]


def _merge(changes: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both sets of changes; what the second replaces as a whole is not changed in parts before.

    An option of a group replaces no value that was asked for.
    """
    whole = tuple(f"{key}." for key in more if key not in Config.model_fields)
    return {key: value for key, value in changes.items() if not key.startswith(whole)} | dict(more)


def _settle(
    config: Mapping[str, Any],
    changes: dict[str, Any],
    found: Broken,
    known: set,
    audit: Audit,
    replaces: bool,
    rounds: int,
) -> dict[str, Any] | None:
    after = audit(apply(config, changes))
    if any(other.identity == found.identity for other, _ in after):
        return None
    new = [other for other, is_error in after if is_error and other.identity not in known]
    if not new:
        return changes
    if rounds == 0:
        return None
    for fix in new[0].fixes:
        if not replaces and any(key in changes and changes[key] != value for key, value in fix.items()):
            continue
        settled = _settle(config, _merge(changes, fix), found, known, audit, replaces, rounds - 1)
        if settled is not None:
            return settled
    return None
