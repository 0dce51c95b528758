"""Probes of `grpo doctor`, each in processes of its own: a crash, a hang or a broken import is a line, not the end.

python -m grpo_cli.doctor_run OWNER_PID PROBE ARGUMENTS_JSON      # prints the result as JSON on its last line
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_cli.process.signals import die_with_parent

TIMEOUT_S = 600.0
_MARK = "grpo-doctor:"


class ProbeError(RuntimeError):
    """What a probe ended with instead of a result."""


def probe(name: str, arguments: dict[str, Any], processes: int = 1, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The result of rank 0. Raises ProbeError with the last words of the process that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    running = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_cli.doctor_run", str(os.getpid()), name, json.dumps(arguments)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(import_path()),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                **({**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for rank in range(processes)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in running]
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no result within {timeout_s:g} s") from None
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise ProbeError(f"exit code {process.returncode}: {_last_words(output)}")
    results = [line for line in outputs[0].splitlines() if line.startswith(_MARK)]
    return json.loads(results[-1].removeprefix(_MARK))


def import_path() -> list[str]:
    """Where a probe looks for modules: where this process does, but never in the working directory.

    A file there may be called `numbers.py` or `profile.py`. Only a checkout's own src/ is needed even where one stands.
    """
    own = Path(__file__).resolve().parents[1]
    return [path for path in sys.path if path and (Path(path).resolve() != Path.cwd() or own == Path.cwd())]


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def collective(backend: str) -> dict[str, Any]:
    """The sum of 1 and 2 over two processes."""
    import torch
    import torch.distributed as dist

    start = time.perf_counter()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend)
    total = torch.tensor(float(rank + 1), device=device)
    dist.all_reduce(total)
    return {"sum": total.item(), "seconds": time.perf_counter() - start}


def ops(op: str) -> dict[str, Any]:
    """Whether DeepSpeed could build one of its ops here."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    builder = ALL_OPS.get(op)
    if builder is None:
        return {"compatible": False, "reason": "this DeepSpeed has no such op for this accelerator"}
    return {"compatible": bool(builder.is_compatible(verbose=False)), "reason": builder.error_log or ""}


def sync(overrides: list[str]) -> dict[str, Any]:
    """Start an engine on the tiny model, change the trainer's weights, send them over, and measure."""
    from grpo_cli.compose import load
    from grpo_cli.errors import GuardStop
    from grpo_cli.process.ranks import start
    from grpo_cli.rollout import make_rollout
    from grpo_cli.rollout.sync import logprob_gap, probe_tokens
    from grpo_cli.trainer.policy import Policy

    cfg = load(overrides, "train").require()
    ranks = start()
    policy = Policy(cfg, ranks)
    begun = time.perf_counter()
    rollout = make_rollout(cfg, policy, ranks)
    start_s = time.perf_counter() - begun
    try:
        before = policy.score(*probe_tokens(policy.tokenizer))
        move(policy.module)
        stale_gap = logprob_gap(before, policy.score(*probe_tokens(policy.tokenizer)))
        try:
            metrics = rollout.sync(policy, 1)
        except GuardStop as error:
            raise SystemExit(f"{error}") from error
    finally:
        rollout.close()
    return {
        "start_s": start_s,
        "sync_s": metrics["time/weight_sync"],
        "gap": metrics["sync/logprob_gap_max"],
        "stale_gap": stale_gap,
    }


def move(module: Any) -> None:
    """Change every weight by about a twentieth."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))


PROBES: dict[str, Callable[..., dict[str, Any]]] = {"collective": collective, "ops": ops, "sync": sync}


def main(arguments: list[str]) -> None:
    """Run one probe and leave at once: some libraries do not come down in one piece. It never outlives the doctor."""
    owner, name, given = arguments
    die_with_parent(int(owner))
    result = PROBES[name](**json.loads(given))
    print(f"\n{_MARK}{json.dumps(result)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
