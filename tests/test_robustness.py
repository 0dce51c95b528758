"""docs/robustness.md: every case has its line, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/robustness.md"
CASES = TESTS.parent.parent / "shared/cases.md"

KINDS = {
    "A": "01 03 05 06 07 09 10 11 14 15 16",
    "B": "01 02 04 05 07 08 10 12 14 15",
    "C": "01 02 03 05 07",
    "D": "02 03 05 06 07 09",
    "E": "01 02 04 06 07 09 11",
    "F": "01 02 04 05 06 08 10 11",
    "G": "01 05 06 07 09 10",
    "H": "01 02 04 06 07 10 11",
    "I": "01 03 04 05 07 08 10 11 12 14",
    "J": "01 02 04 05 06",
    "K": "01 03 04",
    "L": "01 02 03 05",
}
IDS = [kind + number for kind, numbers in KINDS.items() for number in numbers.split()]


def rows() -> dict[str, str]:
    """Case -> what its line says of tests and decisions."""
    return dict(re.findall(r"^\| ([A-L]\d\d) [^|]+ \| (.+) \|$", PAGE.read_text(), re.MULTILINE))


def test_every_case_has_a_line_with_a_test():
    assert len(IDS) == 82
    found = rows()
    assert list(found) == IDS
    assert [case for case, told in found.items() if "::test_" not in told] == []


def test_every_named_test_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 200
    sources = {file: (TESTS / file).read_text() for file, _ in named}
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in sources[file]]
    assert missing == []


@pytest.mark.skipif(not CASES.exists(), reason="the list of cases is not beside this checkout")
def test_the_cases_are_those_of_the_list():
    assert re.findall(r"^\*\*([A-L]\d\d)\*\*", CASES.read_text(), re.MULTILINE) == IDS
