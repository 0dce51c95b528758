"""Small numbers that tell two weights apart: what an engine shows of a tensor that it cannot, or must not, hand out.

A fingerprint is left^T W right for a few fixed pseudo-random vectors of signs. An engine computes `W right` with the
kernel that it also samples with, so a stale packed copy shows although the parameter behind it is fresh.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from grpo_cli.seeds import derive_seed

PROBES = 4
"""Vectors; a difference hides from one of them now and then, from four hardly ever."""


@lru_cache(maxsize=64)
def signs(side: str, length: int) -> Tensor:
    """float32 [PROBES, length] of +1 and -1, the same in every process."""
    generator = torch.Generator().manual_seed(derive_seed("fingerprint", side, length))
    return torch.randint(0, 2, (PROBES, length), generator=generator).float().mul_(2).sub_(1)


def of_weight(weight: Tensor) -> list[float] | None:
    """[PROBES] numbers of a matrix [out, in] or a vector [out]; None for other shapes."""
    weight = weight.detach()
    if weight.ndim == 1:
        return of_output(weight.float().expand(PROBES, -1))
    if weight.ndim != 2:
        return None
    return of_output((weight.float() @ signs("right", weight.shape[1]).to(weight.device).T).T)


def of_output(output_PO: Tensor) -> list[float]:
    """[PROBES] numbers from what the layer makes of `signs("right", in)`: [PROBES, out]."""
    left_PO = signs("left", output_PO.shape[1]).to(output_PO.device)
    return (left_PO * output_PO.float()).sum(dim=1).tolist()


def gap(weight: Tensor, engine: list[float]) -> float:
    """How far the engine's fingerprint is from that of `weight`, relative to the weight's norm; 0 within rounding.

    A relative change d of the weight gives about d. Rounding of bfloat16 gives up to 0.01, of float32 up to 1e-5.
    """
    trainer = of_weight(weight)
    if trainer is None:
        return 0.0
    norm = weight.detach().float().norm().item() or 1.0
    found = max(_or_infinite(abs(one - other)) for one, other in zip(trainer, engine, strict=True)) / norm
    noise = 1e-4 if weight.dtype == torch.float32 else 2e-2
    return 0.0 if found <= noise else found


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value
