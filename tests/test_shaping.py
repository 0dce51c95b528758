"""Weighted sum of reward terms, and the soft overlong penalty."""

from __future__ import annotations

import pytest

from grpo_cli.schema import Overlong
from grpo_cli.shaping import overlong_penalty, shape, weighted_sum
from grpo_cli.types import Completion


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)]
)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_overlong_penalty(length, penalty, factor):
    """Case A16: max 100, buffer 20: a ramp from 80 to 100, flat beyond."""
    overlong = Overlong(max_tokens=100, buffer_tokens=20, penalty=factor)
    assert overlong_penalty(length, overlong) == pytest.approx(penalty * factor)


def test_no_penalty_without_overlong():
    assert overlong_penalty(10**9, None) == 0.0


def test_a_term_that_could_not_score_is_left_out():
    weights = {"a": 2.0, "b": -0.5}
    assert weighted_sum({"a": 1.0, "b": 1.0}, weights) == 1.5
    assert weighted_sum({"a": None, "b": 1.0}, weights) == -0.5
    assert weighted_sum({"a": None, "b": None}, weights) is None
    assert weighted_sum({"a": 0.0, "b": None}, weights) == 0.0


def test_the_sum_does_not_depend_on_the_order():
    values = {"a": 0.1, "b": 0.2, "c": 0.3}
    assert weighted_sum(values, dict.fromkeys(values, 1.0)) == weighted_sum(
        dict(reversed(values.items())), dict.fromkeys(values, 1.0)
    )


def test_shape_counts_the_completions_tokens_alone():
    overlong = Overlong(max_tokens=4, buffer_tokens=2, penalty=1.0)
    completion = Completion("", [1, 2, 3], "stop", rewards={"a": 1.0})
    shape(completion, {"a": 1.0}, overlong)
    assert (completion.unshaped, completion.reward) == (1.0, 0.5)
    unscored = Completion("", [1, 2, 3], "stop", rewards={"a": None})
    shape(unscored, {"a": 1.0}, overlong)
    assert (unscored.unshaped, unscored.reward) == (None, None)
