"""Standard output and error as the world leaves them: closed, full, or with nobody who reads. A run goes on anyway."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TextIO

LOST = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EBADF)
"""A reader that has gone, a terminal that was closed, a full disk, a closed descriptor."""


def open_missing() -> None:
    """Where standard output or error was closed, what is written goes nowhere, also what child processes write."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_WRONLY)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace"))


def say(text: str, stream: TextIO | None = None) -> None:
    """A line on `stream`, standard error unless given; that nobody can read it is no reason to fail."""
    stream = stream or sys.stderr
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            silence(stream.fileno())


def silence(descriptor: int) -> None:
    """What is still in its buffer, and whatever comes, goes nowhere: it would fail again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
