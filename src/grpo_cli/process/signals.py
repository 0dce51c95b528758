"""Signals in a worker: a flag that stages poll, never a jump out of the middle of something."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from types import FrameType

from grpo_cli.errors import signal_exit_code
from grpo_cli.process.rankfile import RankFile

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_REQUEST_S = 1.0
"""A job scheduler signals parent and workers together, and the parent passes its own on: within this time it is one
request."""


def to_handle() -> list[signal.Signals]:
    """Those of `HANDLED` that this process may take over: nohup stays nohup."""
    return [s for s in HANDLED if s != signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]


class Interrupted(Exception):
    """Raised by `Stop.check` in the middle of a stage; the loop catches it, agrees over the ranks, saves and stops."""


class Stop:
    """Whether this rank was asked to stop.

    Until `arm`, there is nothing to save and a signal ends the process at once. After it a signal sets a flag: stages
    call `check()` (raises Interrupted) or `requested()` (does not) where they can be left, as often as they like. The
    loop then agrees over the ranks on `signum`, saves, and raises SignalStop. A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self.rank_file = RankFile(None, 0)
        self._signum = 0
        self._at = 0.0
        self._armed = False
        self._pid = 0

    @property
    def signum(self) -> int:
        """The signal that asked for the stop; 0 where none did. The maximum over the ranks is the one that all act
        on."""
        return self._signum

    def requested(self) -> bool:
        """True once a signal has come. Also tells the watchdog that this rank moves."""
        self.rank_file.alive()
        return self._signum != 0

    def check(self) -> None:
        """Raise Interrupted once a signal has come."""
        if self.requested():
            raise Interrupted

    def install(self, rank_file: RankFile) -> None:
        """Handle signals in this process (main thread), and write the stacks of all threads on SIGUSR1."""
        self.rank_file = rank_file
        self._pid = os.getpid()
        for signum in to_handle():
            signal.signal(signum, self._handle)
        trace = rank_file.trace_file()
        if trace:
            # Open for as long as the process lives; for appending, since the parent empties it before it asks again.
            self._trace = open(trace, "a")  # noqa: SIM115
            faulthandler.register(signal.SIGUSR1, file=self._trace, all_threads=True)

    def arm(self) -> None:
        """From now on there is something to save. Call it on all ranks behind one barrier."""
        self._armed = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child (a reward process) inherits the handler: it dies as it would
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        at = time.monotonic()
        if self._armed and not self._signum:
            self._signum, self._at = signum, at
            self.rank_file.wants_stop(signum)
        elif not self._armed or at - self._at > SAME_REQUEST_S:
            self.rank_file.finish(signal_exit_code(signum), _at_once(signum, self._armed))
            os._exit(signal_exit_code(signum))


def _at_once(signum: int, armed: bool) -> str:
    name = signal.Signals(signum).name
    return f"Ended at once by a second {name}." if armed else f"Stopped by {name} before the first step."


stop = Stop()
"""The one of this process. Stages import it; tests make their own."""


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends: no child outlives its parent.

    `parent` is the process id that the parent had; where it is gone already, this process ends now.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the parent's own clean-up is all there is
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 = PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        sys.exit(1)
