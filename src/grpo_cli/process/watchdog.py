"""Names the rank that stands still. Runs in the parent, which is alive whatever the workers do."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from dataclasses import dataclass

from grpo_cli.process.rankfile import STARTING, Beat, RankFiles, process_state

_TRACE_WAIT_S = 2.0
_ASK_AGAIN_S = 10.0
"""Seconds between two looks at the stacks of ranks that wait for one that still moves."""
# Also DeepSpeed's engine and optimizers: on a GPU it is there that Python waits for what other ranks have to send.
_WAITING = re.compile(r"/torch/distributed/|/deepspeed/comm/|/deepspeed/runtime/|/grpo_cli/process/ranks\.py")
_INNERMOST = 6
"""Frames of a stack that are looked at: a rank that waits for the others has the collective right at the top."""


@dataclass(slots=True)
class _Seen:
    beat: Beat
    at: float


class Watchdog:
    """Ends the wait for a rank that shows no progress for `timeout_s` seconds.

    A rank inside a collective waits for others and is at fault only where no rank moves any more; with ranks on other
    nodes, which are seen there, never. Times are taken here, on a monotonic clock, when a change is seen: clocks of
    other machines and a clock that is set back do not matter. It watches from the first weight sync on; loading a
    model and starting an engine have their own time-outs.
    """

    def __init__(self, files: RankFiles, timeout_s: float, nodes: int = 1):
        self._files = files
        self._timeout_s = timeout_s
        self._nodes = nodes
        self._seen: dict[int, _Seen] = {}
        self._ask_at = -math.inf

    def look(self, now: float) -> str | None:
        """A sentence that names the rank at fault once the time is up; None while all is well. `now`: monotonic
        seconds."""
        done = self._files.exits()
        for rank, beat in self._files.beats().items():
            if rank in done:
                self._seen.pop(rank, None)
            elif rank not in self._seen or self._seen[rank].beat != beat:
                self._seen[rank] = _Seen(beat, now)
        late = [
            rank for rank, seen in self._seen.items() if seen.beat.stage != STARTING and now - seen.at > self._timeout_s
        ]
        culprits = self._stopped(late) or self._at_fault(late, now)
        return self._sentence(late, culprits) if culprits else None

    def _sentence(self, late: list[int], culprits: list[int]) -> str:
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

    def _at_fault(self, late: list[int], now: float) -> list[int]:
        """Ranks whose main thread is not inside a collective; where none moves and the stacks tell nothing, those
        behind."""
        if not late or now < self._ask_at:
            return []
        traces = self._traces(late)
        busy = [rank for rank in late if not waits_in_collective(traces[rank])]
        if len(late) < len(self._seen) or self._nodes > 1:
            self._ask_at = now + _ASK_AGAIN_S
            return [rank for rank in busy if traces[rank]]
        return busy if 0 < len(busy) < len(late) else self._behind(late)

    def _traces(self, late: list[int]) -> dict[int, str]:
        """The stacks of ranks as they are now; empty where none comes."""
        pids = self._files.pids()
        for rank in late:
            self._files.clear_trace(rank)
            with contextlib.suppress(OSError):
                if pids.get(rank):
                    os.kill(pids[rank], signal.SIGUSR1)
        until = time.monotonic() + _TRACE_WAIT_S
        traces, before = dict.fromkeys(late, ""), None
        while time.monotonic() < until and not (traces == before and all(traces.values())):
            time.sleep(0.05)  # it is written line by line: complete when no more comes
            before, traces = traces, {rank: self._files.trace(rank) for rank in late}
        return traces

    def _behind(self, late: list[int]) -> list[int]:
        """Ranks in the earliest stage; all of them where that tells nothing."""
        places = {rank: (self._seen[rank].beat.step, self._seen[rank].beat.order) for rank in late}
        first = min(places.values())
        return [rank for rank in late if places[rank] == first]


def waits_in_collective(trace: str) -> bool:
    """Whether the main thread (the last one that faulthandler writes) stands in a collective operation."""
    frames = [line for line in trace.rsplit("hread 0x", 1)[-1].splitlines() if line.lstrip().startswith("File ")]
    return any(_WAITING.search(line) for line in frames[:_INNERMOST])
