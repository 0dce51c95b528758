"""Errors travel between ranks: each comes out as it went in."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import grpo_cli
from grpo_cli.errors import ConfigError, Finding, GuardStop, RunError, SignalStop
from grpo_cli.process.signals import Interrupted

FINDINGS = [Finding("a_rule", ("a.b",), "a.b is 0.", "a.b=1"), Finding("another", ("c",), "c is 1.", "c=2", "warning")]
RAISED = [ConfigError(FINDINGS), RunError("it broke"), GuardStop("nothing to train on"), SignalStop(15), Interrupted()]

BASES = ("Exception", "RuntimeError", "ValueError", "TypeError", "OSError", *(type(error).__name__ for error in RAISED))


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_to_another_rank(error: Exception) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert (str(there), vars(there)) == (str(error), vars(error))


def test_every_error_class_can_be_remade() -> None:
    """An exception is remade from the message; a class that is made from something else has to say from what."""
    found = 0
    for path in Path(grpo_cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in BASES for base in node.bases):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                assert "__init__" not in methods or "__reduce__" in methods, f"{path}: {node.name}"
                found += 1
    assert found >= len(RAISED)
