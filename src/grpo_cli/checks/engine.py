"""The rule engine: what a rule is, how it reads a config, and which rules a command runs.

A rule is a small generator, registered by `@error(...)` or `@warning(...)`. Its name is the rule id, its docstring the
long reason, the decorator's arguments the keys of its condition. It reads the config through a `View` and yields a
`Broken` for each mistake: a message with the actual values, and the changes that mend it, the best one first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Severity = Literal["error", "warning"]
When = Literal["compose", "config", "start"]


class Changes(dict[str, Any]):
    """Key -> new value: one way to mend a finding, with a remark for the reader."""

    def __init__(self, changes: Mapping[str, Any], note: str = ""):
        super().__init__(changes)
        self.note = note


REMOVE = object()
"""As a value of `Changes`: the key is deleted."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that does not hold: the message, the ways to mend it, and the keys (empty: those of the rule)."""

    rule: str
    message: str
    fixes: tuple[Changes, ...]
    keys: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[str, frozenset[str]]:
        """What makes two findings the same one, whatever their values."""
        return self.rule, frozenset(self.keys)


Found = Iterator[Broken]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the list: `find` is None where another module finds it (while composing, or at run start)."""

    id: str
    severity: Severity
    topic: str
    when: When
    keys: tuple[str, ...]
    why: str
    find: Callable[[View], Found] | None


RULES: dict[str, Rule] = {}
"""Every rule by id, in the order in which findings are listed."""


class Unreadable(Exception):
    """A rule read a key whose shape is wrong: it is not run, so that one mistake is one finding."""


class View:
    """A plain config read by attribute; a missing key is None, a key with a Shape finding raises `Unreadable`.

    `command` is the command that the config is for; no group of the config has that name.

    >>> View({"loss": {"clip_low": 0.2}}, bad=frozenset()).loss.clip_low
    0.2
    """

    def __init__(self, values: Mapping[str, Any], bad: frozenset[str], path: str = "", command: str = "train"):
        self._values, self._bad, self._path = values, bad, path
        self.command = command

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        path = f"{self._path}.{name}" if self._path else name
        if path in self._bad:
            raise Unreadable(path)
        value = self._wrap(self._values.get(name), path)
        self.__dict__[name] = value
        return value

    def _wrap(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return View(value, self._bad, path)
        if isinstance(value, list):
            if any(f"{path}.{index}" in self._bad for index in range(len(value))):
                raise Unreadable(path)
            if any(isinstance(child, Mapping) for child in value):
                return [self._wrap(child, f"{path}.{index}") for index, child in enumerate(value)]
        return value


def lookup(values: Mapping[str, Any] | list, key: str) -> Any:
    """The value of a dotted key in a plain config; None where it is not there.

    >>> lookup({"reward": {"terms": [{"weight": 1.0}]}}, "reward.terms.0.weight")
    1.0
    """
    node: Any = values
    for part in key.split("."):
        if isinstance(node, Mapping):
            node = node.get(part)
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node


Find = Callable[[View], Found]


def error(*keys: str) -> Callable[[Find], Find]:
    """Registers a rule whose findings end the command: the run would crash, hang or train something else."""
    return _register("error", keys)


def warning(*keys: str) -> Callable[[Find], Find]:
    """Registers a rule whose findings are printed while the run goes on: legal, almost surely not meant."""
    return _register("warning", keys)


def _register(severity: Severity, keys: tuple[str, ...]) -> Callable[[Find], Find]:
    def decorator(find: Find) -> Find:
        name = find.__name__
        topic = find.__module__.rpartition(".")[2]
        RULES[name] = Rule(name, severity, topic, "config", keys, inspect.cleandoc(find.__doc__ or ""), find)
        return find

    return decorator


def declare(rule: str, severity: Severity, topic: str, when: When, *keys: str, why: str) -> None:
    """Registers a rule that another module finds: while composing, or at run start."""
    RULES[rule] = Rule(rule, severity, topic, when, keys, " ".join(why.split()), None)


def broken(message: str, *fixes: Mapping[str, Any], keys: tuple[str, ...] = ()) -> Broken:
    """A finding of the rule that yields it: what is wrong with the actual values, and the ways to mend it."""
    changes = tuple(fix if isinstance(fix, Changes) else Changes(fix) for fix in fixes)
    return Broken("", message, changes, keys)


def state(c: View, *keys: str) -> str:
    """`key=value` of some keys, for a message; a user and password in an address are left out."""
    from grpo_cli.checks.overrides import render

    told = ", ".join(f"{key}={render(lookup(c._values, key))}" for key in keys)
    return re.sub(r"(://|=)[^/@\s,]+@", r"\1", told)


def lt(a: Any, b: Any) -> bool:
    """a < b; false where one of them is null."""
    return a is not None and b is not None and a < b


def le(a: Any, b: Any) -> bool:
    """a <= b; false where one of them is null."""
    return a is not None and b is not None and a <= b


def gt(a: Any, b: Any) -> bool:
    """a > b; false where one of them is null."""
    return lt(b, a)


def ge(a: Any, b: Any) -> bool:
    """a >= b; false where one of them is null."""
    return le(b, a)


def run_rule(rule: Rule, view: View) -> list[Broken]:
    """What one rule finds; nothing where it reads a key whose shape is wrong."""
    assert rule.find is not None
    try:
        return [replace(found, rule=rule.id, keys=found.keys or rule.keys) for found in rule.find(view)]
    except Unreadable:
        return []
