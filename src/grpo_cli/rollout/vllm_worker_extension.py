"""What `grpo` adds to a vLLM worker; vLLM mixes it into its own class (`--worker-extension-cls`).

Everything here runs in the engine's process. Nothing takes an object from outside: arguments are text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_cli.rollout import fingerprint

CLASS_PATH = "grpo_cli.rollout.vllm_worker_extension.SyncExtension"


class SyncExtension:
    """Methods for `collective_rpc`; `self` is the vLLM worker."""

    def grpo_load(self, path: str) -> None:
        """Take over the safetensors files of a directory."""
        worker: Any = self
        worker.reload_weights(weights_path=path)
        self.grpo_finish_load()

    def grpo_finish_load(self) -> None:
        """After a reload: renew what the reload leaves stale."""
        repack_heads(_model(self))

    def grpo_fingerprints(self) -> dict[str, list[float]]:
        """`fingerprint` of the weights by HF name, as far as this worker holds them whole."""
        worker: Any = self
        if worker.parallel_config.world_size > 1:
            return {}  # a shard has another fingerprint than the whole
        with torch.inference_mode():
            return dict(fingerprints(_model(self)))


def _model(worker: Any) -> nn.Module:
    return worker.model_runner.get_model()


def repack_heads(model: nn.Module) -> None:
    """Make the CPU backend's packed copy of an output head anew from its weight.

    vLLM packs again what its layerwise reload has loaded; a *tied* head is loaded under the embedding's name, so that
    its copy stays that of the first weights (measured: a logprob gap of 0.1 after one step at lr 1e-4).
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def fingerprints(model: nn.Module) -> Iterator[tuple[str, list[float]]]:
    """(HF name, fingerprint) of embeddings, heads, linear layers, norms and biases; other weights are left out."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    parts = getattr(model, "packed_modules_mapping", None) or {}
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead):
            output_PO = _applied(module, module.embedding_dim)[:, : module.org_vocab_size]
            yield f"{name}.weight", fingerprint.of_output(output_PO)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _plain(f"{name}.weight", module.weight[: module.org_vocab_size])
        elif isinstance(module, LinearBase):
            yield from _linear(name, module, parts.get(name.rpartition(".")[2], []))
        else:
            for parameter_name, parameter in module.named_parameters(recurse=False):
                yield from _plain(f"{name}.{parameter_name}" if name else parameter_name, parameter)


def _linear(name: str, module: Any, part_names: list[str]) -> Iterator[tuple[str, list[float]]]:
    """One fingerprint for each layer of the checkpoint that this one fuses (q, k and v; gate and up)."""
    prefix, _, own_name = name.rpartition(".")
    sizes = list(getattr(module, "output_partition_sizes", [])) or [module.output_size]
    names = part_names if len(part_names) == len(sizes) else [own_name]
    if len(names) != len(sizes):
        return  # fused in a way that the model does not tell
    output_PO = _applied(module, module.input_size)
    biases = [] if module.bias is None else module.bias.split(sizes)
    for index, (part, output) in enumerate(zip(names, output_PO.split(sizes, dim=1), strict=True)):
        yield f"{prefix}.{part}.weight", fingerprint.of_output(output)
        if biases:
            yield from _plain(f"{prefix}.{part}.bias", biases[index])


def _applied(module: Any, input_size: int) -> Tensor:
    """[PROBES, out] that the layer's own kernel makes of the right-hand signs, without its bias."""
    reference = next(module.parameters())
    inputs_PI = fingerprint.signs("right", input_size).to(device=reference.device, dtype=reference.dtype)
    return module.quant_method.apply(module, inputs_PI)


def _plain(name: str, weight: Tensor) -> Iterator[tuple[str, list[float]]]:
    found = fingerprint.of_weight(weight)
    if found is not None:
        yield name, found
