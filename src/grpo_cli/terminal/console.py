"""What a person sees while a run goes on: a live display on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from grpo_cli.terminal.parser import one_line

_RECENT = 8
"""Steps that the live table shows, and over which the time left is averaged."""


class Console(Protocol):
    """One display. `step` shows the row of a finished step; `note` says one line that stays."""

    def step(self, step: int, row: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def make_console(kind: str, name: str, steps: int | None, start: int) -> Console:
    """The display of `logger.console`: auto asks whether standard output is a terminal. `steps` None: not known."""
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    if kind == "off":
        return Silent()
    clock = Clock(steps, start)
    return Live(name, clock) if kind == "rich" else Plain(clock)


class Silent:
    def step(self, step: int, row: Mapping[str, Any]) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing to put away."""


class Clock:
    """Seconds left, from the mean of the last steps. Monotonic: a wall clock that is set back changes nothing."""

    def __init__(self, steps: int | None, start: int):
        self.steps = steps
        self.start = start
        self._marks = deque([time.monotonic()], maxlen=_RECENT + 1)

    def tick(self, step: int) -> None:
        """`step` is done. Step 0 is the evaluation before training: the time that it took tells nothing about steps."""
        if step == 0:
            self._marks.clear()
        self._marks.append(time.monotonic())

    def seconds_left(self, step: int) -> float | None:
        if self.steps is None or len(self._marks) < 2:
            return None
        return max(self.steps - step, 0) * (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1)


def fields(row: Mapping[str, Any]) -> dict[str, str]:
    """The handful of numbers of a step that the display shows, as text; what was not measured is absent.

    >>> fields({"reward": 0.5, "groups/trained_count": 6, "groups/dropped_count": 2})
    {'reward': '0.500', 'kept/dropped': '6/2'}
    """
    shown: dict[str, str] = {}
    for name, key, form in (
        ("reward", "reward", "{:.3f}"),
        ("loss", "loss", "{:.4g}"),
        ("eval", "eval/reward", "{:.3f}"),
    ):
        if row.get(key) is not None:
            shown[name] = form.format(row[key])
    if row.get("groups/trained_count") is not None:
        shown["kept/dropped"] = f"{row['groups/trained_count']:.0f}/{row.get('groups/dropped_count') or 0:.0f}"
    if row.get("rollout/tokens_per_s") is not None:
        shown["tokens/s"] = f"{row['rollout/tokens_per_s']:.0f}"
    if row.get("time/step") is not None:
        shown["s/step"] = f"{row['time/step']:.1f}"
    return shown


def duration(seconds: float | None) -> str:
    """`h:mm:ss`; a dash where it is not known."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


class Plain:
    """One line a step, for files and pipes."""

    def __init__(self, clock: Clock):
        self._clock = clock

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        self._clock.tick(step)
        of = f"/{self._clock.steps}" if self._clock.steps is not None else ""
        parts = [f"step {step}{of}", *(f"{name} {text}" for name, text in fields(row).items())]
        self._print("  ".join([*parts, f"left {duration(self._clock.seconds_left(step))}"]))

    def note(self, text: str) -> None:
        self._print(one_line(text))

    def close(self) -> None:
        """Nothing to put away."""

    @staticmethod
    def _print(text: str) -> None:
        with contextlib.suppress(OSError):  # a reader that went away (`| head`) does not end a run
            print(text, flush=True)


class Live:
    """The last steps as a table over a progress bar."""

    def __init__(self, name: str, clock: Clock):
        from rich.console import Console as RichConsole
        from rich.live import Live as RichLive

        self._name = name
        self._clock = clock
        self._step = clock.start
        self._rows: deque[tuple[int, dict[str, str]]] = deque(maxlen=_RECENT)
        self._live = RichLive(
            console=RichConsole(markup=False, emoji=False), refresh_per_second=2, get_renderable=self._render
        )
        self._live.start()

    def step(self, step: int, row: Mapping[str, Any]) -> None:
        self._clock.tick(step)
        self._step = step
        self._rows.append((step, fields(row)))
        with contextlib.suppress(OSError):
            self._live.refresh()

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._live.console.print(one_line(text), highlight=False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(title=self._name, title_justify="left", box=None, pad_edge=False)
        names = list(dict.fromkeys(name for _, row in self._rows for name in row))
        for name in ("step", *names):
            table.add_column(name, justify="right")
        for step, row in self._rows:
            table.add_row(str(step), *(row.get(name, "–") for name in names))
        of = f"/{self._clock.steps}" if self._clock.steps is not None else ""
        foot = Table.grid(padding=(0, 2))
        foot.add_row(
            f"step {self._step}{of}",
            ProgressBar(total=self._clock.steps, completed=self._step, width=40),
            f"left {duration(self._clock.seconds_left(self._step))}",
        )
        return Group(table, foot)
