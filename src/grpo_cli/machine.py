"""What this machine computes in; only what has to be exact asks torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
"""Instructions on bfloat16: Intel and AMD, AMD and Intel, ARM. Without any, torch computes such products one by one."""


def has_accelerator() -> bool:
    """Whether the workers run on CUDA devices, as far as it shows without opening one."""
    return os.environ.get("DS_ACCELERATOR") != "cpu" and shutil.which("nvidia-smi") is not None


def tell_deepspeed() -> None:
    """Names the accelerator to DeepSpeed, which would guess it and say so on stdout. Call it before that is imported.

    transformers imports DeepSpeed as soon as it builds a model where the package is there.
    """
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


def cpu_has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor has instructions on bfloat16; False where it does not tell."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())


def native_dtype() -> str:
    """`bfloat16` where this machine is fast in it, else `float32`: what `${native_dtype:}` means in a config."""
    return "bfloat16" if has_accelerator() or cpu_has_bfloat16() else "float32"
