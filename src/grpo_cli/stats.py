"""Mean and deviation of a few plain floats, exactly rounded, and honest about equal ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST = 1e60
"""Rewards, weights and other numbers beyond it are refused where they come in: products of two, and the squares of
their sums over a step, then stay far inside a float64. What is trained is a float32, which ends at 3e38."""


def is_constant(values: Sequence[float]) -> bool:
    """Whether all values are equal, exactly; the deviation of equal floats need not be 0. None at all: yes."""
    return not values or max(values) == min(values)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0.0 of no values."""
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Standard deviation, ddof 1; exactly 0.0 where all values are equal.

    >>> deviation([0.3] * 6)
    0.0
    """
    if is_constant(values):
        return 0.0
    average = mean(values)
    return math.sqrt(math.fsum((value - average) ** 2 for value in values) / (len(values) - 1))


def total(values: Sequence[float]) -> float:
    """Sum, exactly rounded; infinite or NaN, and no error, where that is what the values come to."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # a sum beyond a float, or inf - inf
        return sum(values)
