"""Line plots as SVG text, made with matplotlib and nothing global."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#bcbd22", "#7f7f7f")
MAX_POINTS = 1000
"""A longer line is drawn as the means of this many equal stretches."""


@dataclass(frozen=True, slots=True)
class Line:
    """One run's course of one metric; None is a step whose value is not a number: the line breaks there."""

    steps: Sequence[int]
    values: Sequence[float | None]
    colour: str
    dashed: bool = False


def line_plot(lines: Sequence[Line]) -> str:
    """An `<svg>` element with the lines over the step; no text but the numbers on the axes."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "grpo", "text.parse_math": False, "font.size": 8}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.4, 2.2), layout="constrained")
        axes = figure.subplots()
        for line in lines:
            steps, values = thin(line.steps, line.values)
            axes.plot(
                steps,
                [float("nan") if value is None else value for value in values],
                color=line.colour,
                linestyle="--" if line.dashed else "-",
                linewidth=1.3,
                marker="." if len(steps) <= 60 else None,
                markersize=3.5,
            )
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(alpha=0.3, linewidth=0.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        buffer = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=empty)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg ", '<svg class="plot" ', 1)


def thin(steps: Sequence[int], values: Sequence[float | None]) -> tuple[Sequence[float], Sequence[float | None]]:
    """At most MAX_POINTS points: means of equal stretches, over the values that are there."""
    if len(steps) <= MAX_POINTS:
        return steps, values
    edges = [round(part * len(steps) / MAX_POINTS) for part in range(MAX_POINTS + 1)]
    stretches = [slice(first, last) for first, last in pairwise(edges)]
    return [_mean(steps[stretch]) or 0.0 for stretch in stretches], [_mean(values[stretch]) for stretch in stretches]


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
