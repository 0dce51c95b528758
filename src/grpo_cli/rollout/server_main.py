"""The server process: `python -m grpo_cli.rollout.server_main OWNER_PID CORES [vLLM's own arguments]`."""

from __future__ import annotations

import os
import sys

from grpo_cli.process.signals import die_with_parent


def main(arguments: list[str]) -> None:
    """Serve until the owner ends: on CORES (`0,1,…`, or `-` for all), killed by the kernel with its owner.

    The engine's own processes follow it, as soon as `SyncExtension.grpo_end_with` was called.
    """
    owner, cores, *vllm_arguments = arguments
    die_with_parent(int(owner))
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.argv = ["vllm", *vllm_arguments]
    serve()


if __name__ == "__main__":
    main(sys.argv[1:])
