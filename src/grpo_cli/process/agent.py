"""torch's elastic launcher, in a process of its own that dies with its parent and leaves the talking to the workers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

from grpo_cli.process.frame import AGENT_PID
from grpo_cli.process.rankfile import ENV, RankFiles
from grpo_cli.process.signals import HANDLED, die_with_parent

PARENT_PID = "GRPO_PARENT_PID"
FAILURES = "failures.json"
LAST_WORDS = "launcher.error"


def main(argv: list[str]) -> int:
    """`python -m torch.distributed.run` with the arguments of `argv`; writes how ranks failed to FAILURES, and to
    LAST_WORDS that other nodes were not reached. 0 or 1."""
    die_with_parent(int(os.environ[PARENT_PID]))
    os.environ[AGENT_PID] = str(os.getpid())
    for (
        signum
    ) in HANDLED:  # a scheduler signals every process: the workers save, and torch must not shoot them meanwhile
        signal.signal(signum, lambda *_: None)

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        _run(argv)
    except ChildFailedError as error:
        _tell(FAILURES, json.dumps({rank: failure.exitcode for rank, failure in error.failures.items()}))
        return 1
    except (RendezvousError, DistError) as error:
        _tell(LAST_WORDS, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return 1
    return 0


def _run(argv: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    # Without a place of its own the launcher leaves an empty folder in the temporary directory at every run.
    own = f"--log-dir={os.environ[ENV]}"
    try:
        run.run(run.parse_args([own, *argv]))
    except RendezvousConnectionError:
        guest = [argument.replace("is_host=1", "is_host=0") for argument in argv]
        if guest == argv or RankFiles(Path(os.environ[ENV])).pids():
            raise
        run.run(run.parse_args([own, *guest]))  # the launcher of another node, on this machine, listens already


def _tell(name: str, text: str) -> None:
    with contextlib.suppress(OSError):  # the parent has its answer already, and is gone
        (Path(os.environ[ENV]) / name).write_text(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
