"""The frame around a worker's work: signals, one exit code for every way to end, and a way out that does not hang."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from grpo_cli.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    GuardStop,
    RunError,
    SignalStop,
    exit_code_of,
    signal_exit_code,
)
from grpo_cli.files.redact import redact
from grpo_cli.process.rankfile import RankFile
from grpo_cli.process.signals import Interrupted, die_with_parent, stop

AGENT_PID = "GRPO_AGENT_PID"

_LOST = re.compile(r"[Cc]onnection (reset|closed|refused)|Broken pipe|remote process exited")
"""How gloo and NCCL say that the other end of a connection is gone."""


def run_worker(work: Callable[[], str | None]) -> NoReturn:
    """Run `work` in this process as one rank, say how it ended, and end the process with the exit code of design.md.

    `work` returns a sentence for run.json (or None), or raises: ConfigError 2, GuardStop 3, SignalStop 128 + N,
    everything else 1. The parent prints the sentence, once for all ranks; the stack of an unforeseen error is printed
    here.
    """
    rank_file = RankFile.of_this_process()
    agent = os.environ.get(AGENT_PID)
    die_with_parent(int(agent) if agent else None)
    stop.install(rank_file)
    rank_file.register()
    try:
        code, reason = EXIT_OK, work()
    except BaseException as error:
        code, reason = _explain(error, rank_file)
    rank_file.finish(code, redact(reason) if reason else None)
    if agent is None and code != EXIT_OK:
        _say(f"error: {reason}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # To torch's launcher, an end that all ranks agreed on is a success: it would cut short the ranks that still finish.
    agreed = agent is not None and code not in (EXIT_FAILED, EXIT_USAGE)
    # gloo and DeepSpeed threads now and then abort in interpreter shutdown; everything is flushed, so leave at once.
    os._exit(EXIT_OK if agreed else code)


def _explain(error: BaseException, rank_file: RankFile) -> tuple[int, str]:
    """Exit code and sentence of what `work` raised."""
    if isinstance(error, Interrupted):
        return signal_exit_code(stop.signum), f"By {signal.Signals(stop.signum).name}: nothing was saved."
    if isinstance(error, SignalStop):
        name = signal.Signals(error.signum).name
        return exit_code_of(error), f"By {name}: all is saved, and the same command goes on (trainer.resume=auto)."
    if isinstance(error, ConfigError | GuardStop | RunError):
        return exit_code_of(error), str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EXIT_FAILED, f"The disk is full: {error.filename or error}."
    reason = f"{type(error).__name__}: {error}"
    time.sleep(0.5)  # a lost peer shows as a broken connection here, moments before it is known to be gone
    lost = rank_file.peers_gone()
    if lost:
        return EXIT_FAILED, f"Rank {rank_file.rank} lost rank {', '.join(map(str, lost))}: {reason.splitlines()[0]}"
    broken = _LOST.search(reason)
    if broken and os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        told = f"Rank {rank_file.rank} lost a rank of another node ({broken[0]})"
        return EXIT_FAILED, f"{told}; the command there says why, unless the node itself is gone."
    _say("".join(traceback.format_exception(error)))
    return EXIT_FAILED, reason


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(redact(text), file=sys.stderr, flush=True)
