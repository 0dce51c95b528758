"""Accelerators: how many there are, and whether they can do what is asked. Asked without opening one."""

from __future__ import annotations

import shutil
import subprocess

from grpo_cli.checks.start.report import Report
from grpo_cli.machine import cpu_has_bfloat16
from grpo_cli.process import network
from grpo_cli.schema import Config, VllmRollout, VllmServerRollout

BFLOAT16_CAPABILITY = 8.0
"""Compute capability from which CUDA devices have bfloat16 (Ampere)."""


def check(cfg: Config, report: Report) -> None:
    """The rules on accelerators."""
    if cfg.trainer.nnodes > 1 and (wrong := _no_meeting_point(cfg.trainer.rdzv_endpoint)):
        report.add(
            "nodes_have_a_meeting_point",
            f"trainer.nnodes={cfg.trainer.nnodes} and trainer.rdzv_endpoint={cfg.trainer.rdzv_endpoint or 'null'}: "
            f"the nodes have nowhere to meet ({wrong}).",
            "trainer.rdzv_endpoint=HOST:PORT (an address of the first node)",
            {"trainer.nnodes": 1},
        )
    visible = accelerators()
    if visible == 0:
        _without_accelerators(cfg, report)
        return
    _count(cfg, visible, report)
    lowest = lowest_capability()
    if lowest is not None and lowest < BFLOAT16_CAPABILITY and "bfloat16" in (cfg.model.dtype, cfg.rollout_dtype):
        report.add(
            "dtype_supported",
            f"model.dtype={cfg.model.dtype} and rollout.dtype={cfg.rollout.dtype}: a device of compute capability "
            f"{lowest} has no bfloat16 (it needs {BFLOAT16_CAPABILITY}).",
            {"model.dtype": "float32", "rollout.dtype": "float32"},
        )


def _no_meeting_point(endpoint: str | None) -> str | None:
    """Why the launchers of several nodes could not meet at `endpoint`; None where they can."""
    if not endpoint:
        return "none is named"
    try:
        network.address_towards(*network.host_and_port(endpoint))
    except (OSError, ValueError) as error:
        return str(error)
    return None


def accelerators() -> int:
    """Visible CUDA devices; the workers take what torch sees, so torch is asked."""
    import torch

    return torch.cuda.device_count()


def lowest_capability() -> float | None:
    """The lowest compute capability on this machine as the driver tells it; None where it does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return min(float(capability) for capability in told)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def engine_devices(cfg: Config) -> list[int]:
    """Devices that the engine has for itself."""
    return list(cfg.rollout.devices or []) if isinstance(cfg.rollout, VllmRollout) else []


def _without_accelerators(cfg: Config, report: Report) -> None:
    offloaded = [key for key in ("offload_optimizer", "offload_param") if getattr(cfg.trainer, key)]
    if offloaded:
        names = " and ".join(f"trainer.{key}=true" for key in offloaded)
        report.add(
            "offload_needs_an_accelerator",
            f"{names} without an accelerator: everything is on the CPU already.",
            {f"trainer.{key}": False for key in offloaded},
        )
    if isinstance(cfg.rollout, VllmRollout) and (cfg.rollout.sleep_level or 0) > 0:
        report.add(
            "sleep_needs_an_accelerator",
            f"rollout.sleep_level={cfg.rollout.sleep_level} needs an accelerator, and there is none.",
            {"rollout.sleep_level": 0},
        )
    if "bfloat16" in (cfg.model.dtype, cfg.rollout_dtype) and not cpu_has_bfloat16():
        report.add(
            "bfloat16_is_emulated",
            f"model.dtype={cfg.model.dtype} and rollout.dtype={cfg.rollout.dtype}: this processor has no instructions "
            "on bfloat16, which makes every step many times as long.",
            {"model.dtype": "float32", "rollout.dtype": "float32"},
        )
    _two_devices(cfg, 0, report)


def _count(cfg: Config, visible: int, report: Report) -> None:
    own = engine_devices(cfg)
    wanted = cfg.trainer.nproc_per_node + len(own)
    if wanted > visible:
        fits = visible - len(own)
        report.add(
            "processes_fit_devices",
            f"trainer.nproc_per_node={cfg.trainer.nproc_per_node} and {len(own)} rollout.devices need {wanted} "
            f"accelerators; {visible} are visible.",
            {"trainer.nproc_per_node": fits}
            if fits >= 1
            else {"rollout.devices": None, "trainer.nproc_per_node": visible},
        )
    _two_devices(cfg, visible, report)


def _two_devices(cfg: Config, visible: int, report: Report) -> None:
    """NCCL between the trainer and a server on this host needs a device for each."""
    from grpo_cli.checks.quantities import LOCAL_HOSTS, split_url

    if not isinstance(cfg.rollout, VllmServerRollout) or cfg.rollout.weight_sync != "nccl":
        return
    parts = split_url(cfg.rollout.server_url) if cfg.rollout.server_url else None
    # A server of the user's own may be on devices that are not shown here.
    trainers = cfg.trainer.nproc_per_node if cfg.rollout.server_url is None else 1
    here = parts is None or parts.hostname in LOCAL_HOSTS
    if here and visible <= trainers:
        fixes: list[dict[str, object]] = [{"rollout.weight_sync": "disk"}]
        if visible >= 1:
            fixes.append({"rollout.weight_sync": "ipc"})
        if visible >= 2:
            fixes.insert(0, {"trainer.nproc_per_node": visible - 1})
        report.add(
            "nccl_sync_needs_two_devices",
            f"rollout.weight_sync=nccl needs accelerators for the trainer (trainer.nproc_per_node={trainers}) and one "
            f"for the server; {visible} visible.",
            *fixes,
        )
