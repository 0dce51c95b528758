"""What a worker tells its parent: that it lives, where it is, and how it ended. Small files in a private directory.

The parent makes the directory (in memory where it can, so that a full disk silences nobody) and names it in the
environment. A worker without it (started by hand) tells nobody, and works all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ENV = "GRPO_RANKS_DIR"
STARTING = "starting"
"""The stage of a rank that has not begun anything yet."""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def process_state(pid: int) -> str | None:
    """The kernel's letter for the state of a process (T stopped, D in the kernel, Z dead and not reaped); None:
    gone."""
    return next(iter(_stat(pid)), None)


def process_start(pid: int) -> str | None:
    """When a process started, in clock ticks since boot: with its number it names one process for good."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else None


def is_running(pid: int) -> bool:
    """Whether a process is there and not dead."""
    return pid > 0 and process_state(pid) not in (None, "Z", "X")


@dataclass(frozen=True, slots=True)
class Beat:
    """Last sign of progress of a rank: `order` counts the stages of its step, `count` all signs."""

    step: int
    order: int
    count: int
    stage: str


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended: exit code of the run in its eyes, one sentence, and when (monotonic, one host)."""

    code: int
    reason: str | None
    at: float


class RankFile:
    """A worker's side. Every method is cheap and never raises: telling must not break the work."""

    def __init__(self, directory: str | None, rank: int):
        self._dir = Path(directory) if directory else None
        self.rank = rank
        self._fd: int | None = None
        self._step = self._order = self._count = 0
        self._stage = STARTING
        self._last = 0.0

    @classmethod
    def of_this_process(cls) -> RankFile:
        return cls(os.environ.get(ENV), int(os.environ.get("RANK", "0")))

    def register(self) -> None:
        """Write down the process id, so that signals reach this rank directly."""
        if self._dir:
            with contextlib.suppress(OSError):
                self._fd = os.open(self._dir / f"{self.rank}.beat", os.O_WRONLY | os.O_CREAT, 0o600)
                self._write()
                (self._dir / f"{self.rank}.pid").write_text(f"{os.getpid()} {process_start(os.getpid())}")

    def beat(self, step: int, stage: str) -> None:
        """A new stage begins."""
        self._order = self._order + 1 if step == self._step else 0
        self._step, self._stage = step, stage
        self._write()

    def alive(self) -> None:
        """Progress within the stage; written at most twice a second."""
        if time.monotonic() - self._last > 0.5:
            self._write()

    def wants_stop(self, signum: int) -> None:
        """Tell the parent that this rank was asked to stop: it passes the signal on to the others."""
        if self._dir:
            with contextlib.suppress(OSError):
                (self._dir / f"{self.rank}.stop").write_text(str(signum))

    def finish(self, code: int, reason: str | None) -> None:
        """The last word of this rank."""
        if self._dir:
            with contextlib.suppress(OSError):
                aside = self._dir / f"{self.rank}.exit.tmp"
                aside.write_text(json.dumps(asdict(Exit(code, reason, time.monotonic()))))
                aside.rename(self._dir / f"{self.rank}.exit")

    def peers_gone(self) -> list[int]:
        """Other ranks of this node that have failed or died."""
        if not self._dir:
            return []
        files = RankFiles(self._dir)
        exits = files.exits()
        return [
            rank
            for rank, pid in files.pids().items()
            if rank != self.rank and (exits[rank].code != 0 if rank in exits else not is_running(pid))
        ]

    def trace_file(self) -> str | None:
        """Where the stack of this rank goes when the parent asks for it."""
        return str(self._dir / f"{self.rank}.trace") if self._dir else None

    def _write(self) -> None:
        self._last = time.monotonic()
        self._count += 1
        if self._fd is not None:
            with contextlib.suppress(OSError):
                text = json.dumps(asdict(Beat(self._step, self._order, self._count, self._stage))).ljust(200)
                os.pwrite(self._fd, text.encode(), 0)


class RankFiles:
    """The parent's side: reads what all ranks of this node wrote."""

    def __init__(self, directory: Path):
        self.dir = directory

    def pids(self) -> dict[int, int]:
        """Rank -> process id of the ranks that have started; 0 for one whose number another has now."""
        pids = {}
        for rank, text in self._read("pid").items():
            number, _, start = text.partition(" ")
            if start:
                pids[rank] = int(number) if process_start(int(number)) in (None, start) else 0
        return pids

    def beats(self) -> dict[int, Beat]:
        return {rank: Beat(**value) for rank, value in self._json("beat").items()}

    def exits(self) -> dict[int, Exit]:
        return {rank: Exit(**value) for rank, value in self._json("exit").items()}

    def stops(self) -> list[int]:
        """Signals that ranks got from elsewhere."""
        return [int(text) for text in self._read("stop").values() if text.isdigit()]

    def trace(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return (self.dir / f"{rank}.trace").read_text(errors="replace")
        return ""

    def clear_trace(self, rank: int) -> None:
        """Forget the stacks of a rank, before it is asked for new ones."""
        with contextlib.suppress(OSError):
            os.truncate(self.dir / f"{rank}.trace", 0)

    def _json(self, suffix: str) -> dict[int, dict]:
        found = {}
        for rank, text in self._read(suffix).items():
            with contextlib.suppress(ValueError):
                found[rank] = json.loads(text)
        return found

    def _read(self, suffix: str) -> dict[int, str]:
        found = {}
        for path in self.dir.glob(f"*.{suffix}"):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.stem)] = path.read_text()
        return dict(sorted(found.items()))
