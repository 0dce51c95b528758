"""The server process: `python -m grpo_cli.rollout.server_main OWNER_PID CORES [vLLM's own arguments]`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import psutil

from grpo_cli.process.signals import die_with_parent


def main(arguments: list[str]) -> None:
    """Serve until the owner ends: on CORES (`0,1,…`, or `-` for all), killed by the kernel with its owner.

    The engine's own processes follow it from their first moment on, while the model loads too.
    """
    owner, cores, *vllm_arguments = arguments
    die_with_parent(int(owner))
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    os.register_at_fork(after_in_child=follow_server)
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.argv = ["vllm", *vllm_arguments]
    serve()


def follow_server() -> None:
    """From now on this process of the engine ends with the server, which leaves it behind when it is killed.

    The server is the leader of its process group (`ServerProcess` starts it so).
    """
    threading.Thread(target=end_group_with, args=(os.getpgrp(),), daemon=True).start()


def end_group_with(leader_pid: int) -> None:
    """Wait until the leader of our process group is gone, then kill the group: ourselves and what belongs to us."""
    try:
        leader = psutil.Process(leader_pid)
        while leader.is_running() and leader.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.5)
    except psutil.NoSuchProcess:
        pass  # its number is given to nobody else while the group is there
    os.killpg(leader_pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a process that multiprocessing spawned for the server: its engine
    follow_server()
