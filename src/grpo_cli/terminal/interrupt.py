"""Signals to a command that has no workers to pass them on to."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from grpo_cli.errors import signal_exit_code
from grpo_cli.process.signals import SAME_REQUEST_S, to_handle


class SignalExit(SystemExit):
    """Leaves through every `with` and `finally` with exit code 128 + N; no Exception, which a check would take for
    its own."""

    def __init__(self, signum: int):
        super().__init__(signal_exit_code(signum))
        self.signum = signum


@contextlib.contextmanager
def signals_exit() -> Iterator[None]:
    """Within, SIGTERM, SIGINT and SIGHUP raise SignalExit, once a request; what was there before comes back afterwards.

    Call it in the main thread.
    """
    last = -SAME_REQUEST_S

    def leave(signum: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > SAME_REQUEST_S:
            raise SignalExit(signum)

    handlers = {signum: signal.signal(signum, leave) for signum in to_handle()}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
