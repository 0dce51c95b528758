"""Terms `exact` and `number`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.reward import exact, number


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("5", "5", 1.0),
        (" 5 ", "\n5\t", 1.0),
        ("5", "It is 5", 0.0),
        ("a b", "a  b", 0.0),
        ("5", "", 0.0),
        (None, "5", None),
    ],
)
def test_exact(answer, text, value):
    assert exact.grade(answer, text) == value


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("7", "7", 1.0),
        ("7", "3 + 4 = 7", 1.0),
        ("7", "3 + 4 = 7.", 1.0),
        ("7", "**7**", 1.0),
        ("7", "7 or 8", 0.0),
        ("7", "no idea", 0.0),
        ("7", "", 0.0),
        ("-3", "2 - 5 = -3", 1.0),
        ("-3", "= −3", 1.0),  # the minus of typesetting
        ("3", "5-3", 1.0),
        ("-3", "5-3", 0.0),
        ("3", "(x)-3", 1.0),
        ("7", "+7", 1.0),
        ("16", "016", 1.0),
        ("1234", "1,234", 1.0),
        ("1234567", "it is 1,234,567!", 1.0),
        ("234", "1,234", 0.0),
        ("3", "1,2,3", 1.0),  # a list, no separator
        ("7", "7.0", 1.0),
        ("7", "7.5", 0.0),
        ("5", "7.5", 0.0),
        ("7", "7\u0667", 1.0),  # other scripts' digits are letters here
        ("-0", "0", 1.0),
        ("1,234", "1234", 1.0),
        ("7.0", "7", 1.0),
        ("9" * 10_000, "x" + "9" * 10_000, 1.0),
        ("9" * 10_000, "9" * 9_999 + "8", 0.0),
        ("seven", "7", None),
        ("", "7", None),
        ("7 cm", "7", None),
        (None, "7", None),
    ],
)
def test_number(answer, text, value):
    assert number.grade(answer, text) == value


@given(st.integers(), st.text(), st.sampled_from([" ", "\n", "= ", ": "]))
@settings(max_examples=200, deadline=None)
def test_a_number_after_a_space_is_always_found(value, before, gap):
    assert number.grade(str(value), f"{before}{gap}{value}") == 1.0
    assert number.grade(str(value + 1), f"{before}{gap}{value}") == 0.0


@given(st.text(), st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_is_graded(answer, text):
    assert number.grade(answer, text) in (0.0, 1.0, None)
    assert exact.grade(answer, text) in (0.0, 1.0)
