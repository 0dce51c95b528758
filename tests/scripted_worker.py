"""A worker without a model: what it does is the text in the environment variable SCRIPT. Run by tests of launch.py."""

import os
import subprocess
import sys
import time
from typing import Any

from grpo_cli.errors import ConfigError, Finding, GuardStop, RunError, SignalStop
from grpo_cli.process.frame import run_worker
from grpo_cli.process.signals import Interrupted, stop

RANK = int(os.environ["RANK"])
KEY = os.environ["WANDB_API_KEY"]


def wait_for_stop() -> None:
    os.write(1, f"rank {RANK} is ready\n".encode())  # at once: `print` writes the line end by itself
    while True:
        time.sleep(0.02)
        try:
            stop.check()
        except Interrupted:
            time.sleep(0.1)
            raise SignalStop(stop.signum) from None


def leave_a_child() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def work() -> str | None:
    script = os.environ["SCRIPT"]
    if script != "unarmed":
        stop.arm()
    if script not in ("slow", "lost"):
        stop.rank_file.beat(3, "update")
    return SCRIPTS[script]()


def hang_on_rank_1() -> None:
    while RANK == 0:
        time.sleep(0.02)
        stop.requested()
    time.sleep(600)


def joined() -> Any:
    """The real process group, in step 3."""
    from grpo_cli.process import ranks

    group = ranks.start(ranks.longest_wait_s(1.0))
    group.barrier()
    stop.rank_file.beat(3, "update")
    return group


def slow_then_hangs() -> None:
    """Rank 1 waits in a collective, first for a rank that is slow, then for one that hangs."""
    group = joined()
    until = time.monotonic() + (6.0 if RANK == 0 else 0.0)
    while time.monotonic() < until:
        time.sleep(0.02)
        stop.requested()
    group.gather(RANK)
    stop.rank_file.beat(3, "record")
    if RANK == 0:
        time.sleep(600)
    group.gather(RANK)


def lost_in_a_collective() -> None:
    group = joined()
    if RANK == 1:
        os.kill(os.getpid(), 9)
    group.gather(RANK)


def raise_(error: BaseException) -> None:
    raise error


SCRIPTS = {
    "done": lambda: "all went well",
    "guard": lambda: raise_(GuardStop("the sync check failed in layers.0")),
    "config": lambda: raise_(ConfigError(Finding("some_rule", ("a.b",), "a.b is 0.", "a.b=1"))),
    "fails": lambda: raise_(RunError(f"it broke; the key is {KEY}")) if RANK == 1 else wait_for_stop(),
    "killed": lambda: os.kill(os.getpid(), 9) if RANK == 1 else wait_for_stop(),
    "hangs": hang_on_rank_1,
    "frozen": lambda: os.kill(os.getpid(), 19) if RANK == 1 else wait_for_stop(),
    "slow": slow_then_hangs,
    "lost": lost_in_a_collective,
    "child": leave_a_child,
    "waits": wait_for_stop,
    "unarmed": wait_for_stop,
}

if __name__ == "__main__":
    run_worker(work)
