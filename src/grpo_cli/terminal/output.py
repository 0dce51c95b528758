"""Standard output and error as the world leaves them: closed, full, or with nobody who reads. A run goes on anyway."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

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


def say(text: str) -> None:
    """A line on standard error; that nobody can read it is no reason to fail."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(2)


def silence(*descriptors: int) -> None:
    """What is still in their buffers, and whatever comes, goes nowhere: it would fail again at exit."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in descriptors:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
