"""Rules of the rollout engines and of the weight sync."""

from __future__ import annotations

from typing import Any

from grpo_cli.checks.engine import Found, View, broken, declare, error, ge, gt, le, lt, state, warning
from grpo_cli.checks.quantities import LOCAL_HOSTS, colocated, divisors, rollout_dtype, split_url


def own_devices(c: View) -> bool:
    """Whether a vLLM engine of this run has devices of its own."""
    return c.rollout.name == "vllm" and c.rollout.devices is not None


def back_on_trainer_devices(c: View) -> dict[str, Any]:
    """The changes that put the engine on the trainer's devices."""
    return {"rollout.devices": None, "rollout.weight_sync": "in_process"}


@error("rollout.weight_sync", "rollout.name")
def hf_needs_in_process_sync(c: View) -> Found:
    """hf generates with the trained module; there is nothing to send weights to."""
    if c.rollout.name == "hf" and c.rollout.weight_sync != "in_process":
        yield broken(
            f"{state(c, 'rollout.weight_sync')}, but rollout.name=hf generates with the trained module itself.",
            {"rollout.weight_sync": "in_process"},
        )


@error("rollout.weight_sync", "rollout.name", "rollout.devices")
def in_process_sync_needs_local_engine(c: View) -> Found:
    """The engine lives in another process or on other devices: it would sample the initial weights for ever."""
    if c.rollout.weight_sync == "in_process" and (c.rollout.name == "vllm_server" or own_devices(c)):
        where = "rollout.name=vllm_server" if c.rollout.name == "vllm_server" else state(c, "rollout.devices")
        disk, nccl = {"rollout.weight_sync": "disk"}, {"rollout.weight_sync": "nccl"}
        yield broken(
            f"rollout.weight_sync=in_process does not reach the engine of {where}.",
            *((disk, nccl) if c.rollout.name == "vllm_server" else (nccl, disk)),
        )


@error("rollout.weight_sync", "rollout.name", "rollout.server_url", "rollout.devices")
def ipc_sync_needs_shared_devices(c: View) -> Found:
    """Memory handles open only on the device that made them: an error, or garbage."""
    parts = split_url(c.rollout.server_url) if c.rollout.name == "vllm_server" and c.rollout.server_url else None
    elsewhere = parts is not None and parts.hostname not in LOCAL_HOSTS
    if c.rollout.weight_sync == "ipc" and (elsewhere or own_devices(c)):
        where = "rollout.server_url" if elsewhere else "rollout.devices"
        yield broken(
            f"rollout.weight_sync=ipc needs an engine on the trainer's devices, but {state(c, where)}.",
            {"rollout.weight_sync": "nccl"},
        )


@error("rollout.weight_sync", "rollout.devices", "rollout.name")
def nccl_sync_needs_separate_devices(c: View) -> Found:
    """NCCL refuses two ranks on one device, or hangs."""
    if c.rollout.weight_sync == "nccl" and colocated(c):
        first, count = c.trainer.nproc_per_node, c.rollout.tensor_parallel_size or 1
        yield broken(
            "rollout.weight_sync=nccl needs an engine with its own devices; rollout.devices=null shares the trainer's.",
            {"rollout.weight_sync": "in_process"},
            {"rollout.devices": list(range(first, first + count))},
        )


@error("rollout.devices", "trainer.nproc_per_node", "rollout.name")
def engine_devices_disjoint_from_trainer(c: View) -> Found:
    """The trainer's process i runs on device i. An engine on the same device: out of memory."""
    devices, first = c.rollout.devices, c.trainer.nproc_per_node
    if c.rollout.name == "vllm" and devices and any(device < first for device in devices):
        yield broken(
            f"{state(c, 'rollout.devices')}: devices below trainer.nproc_per_node={first} belong to the trainer.",
            {"rollout.devices": list(range(first, first + len(devices)))},
            back_on_trainer_devices(c),
        )


@error("rollout.tensor_parallel_size", "rollout.devices", "trainer.nproc_per_node", "rollout.name")
def tensor_parallel_divides_devices(c: View) -> Found:
    """Engines of rollout.tensor_parallel_size devices each must use up all devices: left-over ones form no engine, and
    start-up waits for them. An empty list of devices forms none at all."""
    size, devices = c.rollout.tensor_parallel_size, c.rollout.devices
    if c.rollout.name != "vllm" or size is None:
        return
    count = c.trainer.nproc_per_node if devices is None else len(devices)
    if count == 0:
        size = divisors(c.trainer.nproc_per_node, size)[0]
        whole = {} if size == c.rollout.tensor_parallel_size else {"rollout.tensor_parallel_size": size}
        yield broken("rollout.devices=[] is no device.", back_on_trainer_devices(c) | whole)
    elif count % size != 0:
        yield broken(
            f"rollout.tensor_parallel_size={size} does not divide the {count} devices "
            f"({state(c, 'trainer.nproc_per_node' if devices is None else 'rollout.devices')}); "
            f"{', '.join(map(str, divisors(count, size)))} does.",
            {"rollout.tensor_parallel_size": divisors(count, size)[0]},
        )


@error("rollout.gpu_memory_utilization")
def memory_fraction_in_range(c: View) -> Found:
    """It is a fraction, not per cent: the engine would refuse to start."""
    if le(c.rollout.gpu_memory_utilization, 0) or gt(c.rollout.gpu_memory_utilization, 1):
        yield broken(
            f"{state(c, 'rollout.gpu_memory_utilization')} is no fraction in (0, 1].",
            {"rollout.gpu_memory_utilization": 0.4},
        )


@warning("rollout.gpu_memory_utilization", "rollout.sleep_level", "rollout.devices", "rollout.name")
def colocated_engine_leaves_memory(c: View) -> Found:
    """The engine holds most of the device while the trainer needs it; asleep it would not."""
    share = c.rollout.gpu_memory_utilization
    if colocated(c) and c.rollout.sleep_level in (None, 0) and gt(share, 0.6) and le(share, 1):
        yield broken(
            f"rollout.gpu_memory_utilization={share} stays taken while the trainer needs the device "
            f"({state(c, 'rollout.sleep_level')}).",
            {"rollout.gpu_memory_utilization": 0.4},
            {"rollout.sleep_level": 1},
        )


@error("rollout.sleep_level", "rollout.devices")
def sleep_needs_colocated_engine(c: View) -> Found:
    """On devices of its own nobody needs the engine's memory, and an engine asleep serves no rollout."""
    if gt(c.rollout.sleep_level, 0) and c.rollout.devices is not None:
        yield broken(
            f"{state(c, 'rollout.sleep_level')} frees {state(c, 'rollout.devices')}, which the trainer does not use.",
            {"rollout.sleep_level": 0},
        )


@error("rollout.sleep_level", "model.lora")
def sleep_level_two_excludes_lora(c: View) -> Found:
    """Level 2 discards weights that the sync of an adapter does not send again."""
    if c.rollout.sleep_level == 2 and c.model.lora is not None:
        yield broken(
            "rollout.sleep_level=2 discards base weights that the sync of model.lora does not send again.",
            {"rollout.sleep_level": 1},
            {"rollout.sleep_level": 0},
        )


@error("rollout.server_url")
def server_url_valid(c: View) -> Found:
    """The address of a server is http:// or https:// with a host. The client would fail only at the first rollout."""
    url = c.rollout.server_url
    if url is not None and split_url(url) is None:
        bare = url.rpartition("@")[2]
        # Behind another scheme, or a misspelt one, http:// would make that scheme the host.
        is_bare = "//" not in url and ":/" not in url and split_url(f"http://{bare}") is not None
        guess = [{"rollout.server_url": f"http://{bare}"}] if is_bare else []
        yield broken(
            f"{state(c, 'rollout.server_url')} is not http://HOST:PORT or https://HOST:PORT.",
            *guess,
            {"rollout.server_url": None},
        )


@error("rollout.sync_tolerance")
def sync_tolerance_positive(c: View) -> Found:
    """Without a tolerance stale weights are never noticed; 0 stops at the first rounding."""
    if c.rollout.sync_tolerance is None or c.rollout.sync_tolerance <= 0:
        yield broken(f"{state(c, 'rollout.sync_tolerance')} is not positive.", {"rollout.sync_tolerance": 0.05})


@warning("rollout.sync_tolerance", "rollout.dtype", "model.dtype")
def sync_tolerance_detects_stale_weights(c: View) -> Found:
    """In float32 stale weights show as a gap of 0.1, against rounding of 2e-5: this tolerance lets them pass."""
    both = rollout_dtype(c) == "float32" and c.model.dtype == "float32"
    if both and ge(c.rollout.sync_tolerance, 0.1):
        yield broken(
            f"{state(c, 'rollout.sync_tolerance')} lets stale float32 weights pass, which show as 0.1.",
            {"rollout.sync_tolerance": 0.01},
        )


@warning("rollout.sync_tolerance", "rollout.dtype", "model.dtype", "rollout.name")
def sync_tolerance_above_bfloat16_noise(c: View) -> Found:
    """bfloat16 rounding alone exceeds such a tolerance and stops the run."""
    low = gt(c.rollout.sync_tolerance, 0) and lt(c.rollout.sync_tolerance, 0.01)
    if c.rollout.name != "hf" and "bfloat16" in (rollout_dtype(c), c.model.dtype) and low:
        yield broken(
            f"{state(c, 'rollout.sync_tolerance')} is within bfloat16 rounding and stops the run.",
            {"rollout.sync_tolerance": 0.05},
        )


declare(
    "engine_installed", "error", "engines", "start", "rollout.name", "rollout.server_url",
    why="""rollout=vllm, or vllm_server with a server of its own, needs the package vllm, which cannot be found: an
    import error after the trainer has loaded its weights. Install the extra vllm, or use rollout=hf.""",
)  # fmt: skip
declare(
    "nccl_sync_needs_two_devices", "error", "engines", "start", "rollout.weight_sync", "rollout.server_url",
    why="""rollout.weight_sync=nccl with a server on this host, and no accelerator is left for it: fewer than two are
    visible, or trainer.nproc_per_node takes all of them and the server is the run's own. Trainer and server would share
    a device; NCCL hangs. Set rollout.weight_sync=disk, or ipc.""",
)  # fmt: skip
declare(
    "sleep_needs_an_accelerator", "error", "engines", "start", "rollout.sleep_level",
    why="""rollout.sleep_level is above 0 without an accelerator. Sleep mode has no CPU form: the engine raises. Set
    rollout.sleep_level=0.""",
)  # fmt: skip
declare(
    "server_answers", "error", "engines", "start", "rollout.server_url", "rollout.weight_sync", "model.path",
    why="""The server of rollout.server_url does not answer, serves another model, or has no endpoint for
    rollout.weight_sync. The run would hang, or train on another model's completions. Start the server as the message
    shows.""",
)  # fmt: skip
