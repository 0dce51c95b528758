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
from grpo_cli.process.rankfile import ENV
from grpo_cli.process.signals import HANDLED, die_with_parent

PARENT_PID = "GRPO_PARENT_PID"
FAILURES = "failures.json"


def main(argv: list[str]) -> int:
    """`python -m torch.distributed.run` with the arguments of `argv`; writes how ranks failed to FAILURES. 0 or 1."""
    die_with_parent(int(os.environ[PARENT_PID]))
    os.environ[AGENT_PID] = str(os.getpid())
    for (
        signum
    ) in HANDLED:  # a scheduler signals every process: the workers save, and torch must not shoot them meanwhile
        signal.signal(signum, lambda *_: None)

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        # Without a place of its own the launcher leaves an empty folder in the temporary directory at every run.
        run.run(run.parse_args([f"--log-dir={os.environ[ENV]}", *argv]))
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        with contextlib.suppress(OSError):  # the parent has its answer already, and is gone
            (Path(os.environ[ENV]) / FAILURES).write_text(json.dumps(failures))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
