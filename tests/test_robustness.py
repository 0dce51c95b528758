"""docs/robustness.md: every case has its line, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/robustness.md"
CASES = TESTS.parent.parent / "shared/cases.md"


def test_every_named_test_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 100
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (TESTS / file).read_text()]
    assert missing == []


def test_every_case_has_a_line() -> None:
    if not CASES.exists():
        pytest.skip("the list of cases is not beside this checkout")
    cases = set(re.findall(r"^\*\*([A-L]\d\d)\*\*", CASES.read_text(), re.MULTILINE))
    assert set(re.findall(r"^\| ([A-L]\d\d) ", PAGE.read_text(), re.MULTILINE)) == cases
