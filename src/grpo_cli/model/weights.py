"""Whole weights out of a model that may be sharded (ZeRO-3) or wrapped in adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

GATHER_ELEMENTS = 2**27
"""Parameters gathered at a time: a layer of a large model, all of a small one."""


def is_sharded(parameter: Tensor) -> bool:
    """Whether ZeRO-3 holds only a part of `parameter` on this rank."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Sequence[Tensor]) -> Iterator[None]:
    """The parameters are whole inside this context. Collective: every rank names the same ones, in the same order."""
    if not any(is_sharded(parameter) for parameter in parameters):
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters(list(parameters)):
        yield


def full_parameters(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole detached tensor) of every weight, as transformers names them, a few at a time on all ranks.

    A tensor is only good until the next one is asked for. Adapters come merged into the weights that they change;
    a tied output head is the embedding under another name and does not come twice.
    """
    for modules in _chunks(without_adapters(lm)):
        parameters = [p for _, module in modules for p in module.parameters(recurse=not _is_plain(module))]
        with gathered(parameters), torch.no_grad():
            for prefix, module in modules:
                yield from _named(prefix, module)


def without_adapters(lm: nn.Module) -> Any:
    """The transformers model itself; adapters, if any, are modules inside it."""
    get_base_model: Any = getattr(lm, "get_base_model", None)
    return lm if get_base_model is None else get_base_model()


def _is_plain(module: nn.Module) -> bool:
    return not hasattr(module, "get_delta_weight")


def _named(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if _is_plain(module):
        for name, parameter in module.named_parameters(prefix, recurse=False):
            yield name, parameter.detach()
        return
    base: Any = module.get_base_layer()  # type: ignore[operator]
    for name, parameter in base.named_parameters(prefix, recurse=False):
        weight = parameter.detach()
        if name.endswith(".weight"):
            for adapter in module.active_adapters:  # type: ignore[union-attr]
                weight = weight + module.get_delta_weight(adapter).to(weight.dtype)  # type: ignore[operator]
        yield name, weight


def _chunks(lm: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Modules that own weights, with their names, in groups of at most `GATHER_ELEMENTS`; none owned twice."""
    seen: set[int] = set()
    inside_adapter: tuple[str, ...] = ()
    chunk: list[tuple[str, nn.Module]] = []
    size = 0
    for name, module in lm.named_modules():
        if name.startswith(inside_adapter) and inside_adapter:
            continue
        if not _is_plain(module):
            inside_adapter = (*inside_adapter, f"{name}.")
        owned = list(module.parameters(recurse=not _is_plain(module)))
        new = [p for p in owned if id(p) not in seen]
        seen.update(id(p) for p in owned)
        if not new:
            continue
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in new)
        if chunk and size + elements > GATHER_ELEMENTS:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, module))
        size += elements
    if chunk:
        yield chunk
