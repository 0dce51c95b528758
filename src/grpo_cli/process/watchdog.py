"""Names the rank that stands still. Runs in the parent, which is alive whatever the workers do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass

from grpo_cli.process.rankfile import Beat, RankFiles, process_state

_TRACE_WAIT_S = 2.0
_WAITING = re.compile(r"/torch/distributed/|/deepspeed/comm/|/grpo_cli/process/ranks\.py")
_INNERMOST = 6
"""Frames of a stack that are looked at: a rank that waits for the others has the collective right at the top."""


@dataclass(slots=True)
class _Seen:
    beat: Beat
    at: float


class Watchdog:
    """Ends the wait for a rank that shows no progress for `timeout_s` seconds.

    Times are taken here, on a monotonic clock, when a change is seen: clocks of other machines and a clock that is
    set back do not matter. It watches from the first step on; loading a model has its own time-outs.
    """

    def __init__(self, files: RankFiles, timeout_s: float):
        self._files = files
        self._timeout_s = timeout_s
        self._seen: dict[int, _Seen] = {}

    def look(self, now: float) -> str | None:
        """A sentence that names the rank at fault once the time is up; None while all is well. `now`: monotonic
        seconds."""
        done = self._files.exits()
        for rank, beat in self._files.beats().items():
            if rank in done:
                self._seen.pop(rank, None)
            elif rank not in self._seen or self._seen[rank].beat != beat:
                self._seen[rank] = _Seen(beat, now)
        late = [rank for rank, seen in self._seen.items() if seen.beat.step and now - seen.at > self._timeout_s]
        if not late:
            return None
        return self._accuse(late)

    def _accuse(self, late: list[int]) -> str:
        culprits = self._stopped(late) or self._not_waiting(late) or self._behind(late)
        beat = self._seen[culprits[0]].beat
        who = f"Rank {culprits[0]} stands" if len(culprits) == 1 else f"Ranks {', '.join(map(str, culprits))} stand"
        waiting = [rank for rank in late if rank not in culprits]
        tail = f" The others ({', '.join(map(str, waiting))}) wait for it." if waiting else ""
        return (
            f"{who} still in step {beat.step}, stage {beat.stage}, for more than"
            f" trainer.step_timeout_s={self._timeout_s:g} seconds.{tail}"
        )

    def _stopped(self, late: list[int]) -> list[int]:
        """Ranks that the kernel does not run: stopped, or dead."""
        pids = self._files.pids()
        return [rank for rank in late if rank in pids and process_state(pids[rank]) in ("T", "t", "Z", None)]

    def _not_waiting(self, late: list[int]) -> list[int]:
        """Ranks whose main thread is not inside a collective, where the stacks tell some apart from the others."""
        pids = self._files.pids()
        for rank in late:
            with contextlib.suppress(OSError):
                if pids.get(rank):
                    os.kill(pids[rank], signal.SIGUSR1)
        until = time.monotonic() + _TRACE_WAIT_S
        while time.monotonic() < until and not all(self._files.trace(rank) for rank in late):
            time.sleep(0.05)
        busy = [rank for rank in late if not waits_in_collective(self._files.trace(rank))]
        return busy if len(busy) < len(late) else []

    def _behind(self, late: list[int]) -> list[int]:
        """Ranks in the earliest stage; all of them where that tells nothing."""
        places = {rank: (self._seen[rank].beat.step, self._seen[rank].beat.order) for rank in late}
        first = min(places.values())
        return [rank for rank in late if places[rank] == first]


def waits_in_collective(trace: str) -> bool:
    """Whether the main thread (the last one that faulthandler writes) stands in a collective operation."""
    frames = [line for line in trace.rsplit("hread 0x", 1)[-1].splitlines() if line.lstrip().startswith("File ")]
    return any(_WAITING.search(line) for line in frames[:_INNERMOST])
