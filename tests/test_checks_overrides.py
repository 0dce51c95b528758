"""Values and fixes as they are typed: what is written is read back by Hydra as the same value."""

from __future__ import annotations

import shlex

import pytest
from check_helpers import with_values
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.checks.engine import REMOVE
from grpo_cli.checks.overrides import apply, read_first, render, write

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-6"),
        (3e-4, "3e-4"),
        (0.25, "0.25"),
        (1.5e-7, "1.5e-7"),
        (1e22, "1e22"),
        (1.0, "1.0"),
        ("sdpa", "sdpa"),
        ("http://gpu7:8000", "http://gpu7:8000"),
        ("./here", "./here"),
        ("null", '"null"'),
        ("2024", '"2024"'),
        ("", '""'),
        ('a"b', r'"a\"b"'),
        ([0.9, None, "a b"], '[0.9,null,"a b"]'),
        ({"name": "exact", "weight": 1}, "{name:exact,weight:1}"),
    ],
)
def test_render(value, text):
    assert render(value) == text
    assert with_values({}, [f"x={text}"])["x"] == value


@given(LEAVES | st.lists(LEAVES, max_size=3))
def test_what_is_rendered_is_read_back_as_the_same_value(value):
    back = with_values({}, [f"x={render(value)}"])["x"]
    assert back == value
    assert type(back) is type(value)


@given(st.dictionaries(st.sampled_from(["a.b", "c", "d.e.f"]), LEAVES, min_size=1))
def test_a_written_alternative_is_read_back_from_a_shell_line(changes):
    line = write(changes, "with a remark")
    expected = [f"{key}={render(value)}" for key, value in changes.items()]
    assert shlex.split(line.removesuffix(" (with a remark)")) == expected
    if not any(", or " in word for word in expected):
        assert read_first(f"{line}, or other=1") == expected


def test_write_removes_and_quotes_for_the_shell():
    assert write({"trainer.lrr": REMOVE, "trainer.lr": 1e-6}) == "~trainer.lrr trainer.lr=1e-6"
    assert write({"reward.terms": [{"name": "exact", "weight": 1.0}]}) == "'reward.terms=[{name:exact,weight:1.0}]'"


def test_apply_changes_a_copy():
    config = {"a": {"b": 1}, "terms": [{"name": "x", "weight": 1.0}], "untouched": {}}
    changed = apply(config, {"a.b": 2, "terms.0.weight": 0.5, "new.key": None, "a.gone": REMOVE})
    assert changed == {
        "a": {"b": 2},
        "terms": [{"name": "x", "weight": 0.5}],
        "untouched": {},
        "new": {"key": None},
    }
    assert config == {"a": {"b": 1}, "terms": [{"name": "x", "weight": 1.0}], "untouched": {}}
    assert changed["untouched"] is config["untouched"]
