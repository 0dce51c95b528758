"""The policy network: a Hugging Face causal LM that answers with logprobs of given tokens, never with all logits."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_cli.batch import MicroBatch
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.model import attention
from grpo_cli.model.builtin import locate
from grpo_cli.model.weights import without_adapters
from grpo_cli.schema import Model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

LOGIT_BYTES = 256 * 2**20
"""Memory for float32 logits of one chunk of tokens; what does not fit is computed again in the backward pass."""


def load_causal_lm(cfg: Model) -> nn.Module:
    """The model of `model.path` in `model.dtype` in CPU memory, from safetensors only, with every dropout off.

    Raises ConfigError (`model_readable`) where config or weights cannot be read, and where a weight is missing:
    transformers would put random numbers in its place.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention.register()
    try:
        model, missing = _from_pretrained(cfg, locate(cfg.path))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, ConfigError | torch.OutOfMemoryError) or getattr(error, "errno", None) is not None:
            raise  # not the model's fault
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _unreadable(cfg, f"cannot be loaded: {reason}") from error
    if missing:
        raise _unreadable(cfg, f"lacks {len(missing)} of its weights, for example {missing[0]}.")
    if cfg.attn_implementation == "sdpa" and getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(attention.IMPLEMENTATION)
    return model


def _from_pretrained(cfg: Model, path: Path | str) -> tuple[Any, list[str]]:
    """The model, and the names of the parameters that its files do not have."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hub = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    config = AutoConfig.from_pretrained(path, **hub)
    silenced = _silence(config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=DTYPES[cfg.dtype],
        use_safetensors=True,
        attn_implementation=cfg.attn_implementation,
        output_loading_info=True,
        **hub,
    )
    model, report = loaded
    model.silenced = silenced
    return model, sorted(report["missing_keys"])


def _unreadable(cfg: Model, reason: str) -> ConfigError:
    fix = "model.path of a whole model in safetensors; pickled weights are never read"
    return ConfigError(Finding("model_readable", ("model.path",), f"model.path={cfg.path} {reason}", fix))


def _silence(config: Any) -> dict[str, float]:
    """Switch off all that draws random numbers in a forward pass: the ratio must be 1 before the first update.

    Returns what it found.
    """
    names = [name for name in vars(config) if "dropout" in name or "pdrop" in name or "jitter" in name]
    found = {name: getattr(config, name) for name in names if isinstance(getattr(config, name), float)}
    for name in found:
        setattr(config, name, 0.0)
    return found


def config_to_save(causal_lm: Any) -> Any:
    """The model's config as it came, dropouts included: what belongs beside its weights in a directory."""
    config = copy.deepcopy(causal_lm.config)
    for name, value in causal_lm.silenced.items():
        setattr(config, name, value)
    return config


def add_lora(model: nn.Module, cfg: Model) -> nn.Module:
    """`model` with trainable adapters on `model.lora.target_modules`, everything else frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(
            Finding("model_readable", ("model.lora",), "model.lora needs the package peft.", "pip install grpo[lora]")
        ) from error
    assert cfg.lora is not None
    lora = LoraConfig(
        r=cfg.lora.rank,
        lora_alpha=cfg.lora.alpha,  # type: ignore[arg-type]
        lora_dropout=cfg.lora.dropout,
        target_modules=cfg.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora, autocast_adapter_dtype=False)  # type: ignore[arg-type, return-value]


class Scorer(nn.Module):
    """A causal LM, plain or with adapters, whose forward gives the logprobs of a micro-batch's completion tokens."""

    def __init__(self, lm: nn.Module, temperature: float):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        head: Any = self.causal_lm.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ConfigError(
                Finding(
                    "lora_targets_exist",
                    ("model.lora.target_modules", "model.path"),
                    f"The output head is a {type(head).__name__}; grpo scores through a plain linear one.",
                    "Leave the output head out of model.lora.target_modules.",
                )
            )
        # The head is called as a module, so that ZeRO-3 gathers its weight; only its arithmetic is ours.
        head.forward = types.MethodType(_head_forward, head)  # type: ignore[method-assign]

    @property
    def causal_lm(self) -> Any:
        """The transformers model, with adapters inside if there are any."""
        return without_adapters(self.lm)

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return self.causal_lm.get_output_embeddings().out_features

    def forward(
        self, micro: MicroBatch | None = None, entropies: bool = True, plain_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logprobs and, if asked, entropies, both [T] float32, of the tempered distribution at each completion token.

        With `plain_ids` [1, n] instead: of each of these tokens but the first, by the model's own forward pass.
        """
        causal_lm = self.causal_lm
        if micro is None:
            assert plain_ids is not None
            logits = causal_lm(input_ids=plain_ids, use_cache=False).logits[0, :-1].float() / self.temperature
            return logits.log_softmax(-1).gather(-1, plain_ids[0, 1:, None])[:, 0], None
        config = causal_lm.config
        decoder = getattr(causal_lm, causal_lm.base_model_prefix)
        hidden_BLH = decoder(
            input_ids=micro.input_ids,
            position_ids=micro.position_ids,
            use_cache=False,
            **attention_inputs(micro, config, causal_lm.dtype),
        ).last_hidden_state
        hidden_TH = hidden_BLH.flatten(0, 1)[micro.source_T]
        head = causal_lm.get_output_embeddings()
        scale = logit_scale(config) / self.temperature
        return head(hidden_TH, targets_T=micro.targets_T, entropies=entropies, scale=scale, softcap=softcap(config))


def attention_inputs(micro: MicroBatch, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """How the attention of a packed row is told to each kind of kernel. Masks come from lengths, never from ids."""
    implementation = config._attn_implementation
    if micro.spans is None or implementation.startswith("flash"):
        # Right-padded rows are plainly causal; flash kernels find packed sequences in the position ids.
        return {"attention_mask": None}
    if implementation == attention.IMPLEMENTATION:
        # A 4-D mask passes through transformers untouched: here only the sign that none need be made.
        return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "packing": micro.plan}
    windows = _windows(config.get_text_config())
    masks = {}
    for window in set(windows.values()):
        mask = attention.dense_mask(micro.spans, window).to(micro.input_ids.device)
        if implementation != "sdpa":  # every other kernel adds its mask to the scores
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        masks[window] = mask
    # One mask for all layers where it can be: only families whose layers differ take one for each kind.
    by_kind = {kind: masks[window] for kind, window in windows.items()}
    return {"attention_mask": by_kind if len(masks) > 1 else mask}


def _windows(config: Any) -> dict[str, int | None]:
    """How many positions back each kind of layer reads, by transformers' name of the kind; None: all of them.

    Of a model whose layers are all alike, one kind: {"sliding_attention": 4096} for the first Mistral.
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def logit_scale(config: Any) -> float:
    """Factor that some families put on their logits."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / config.logits_scaling
    return float(getattr(config, "logit_scale", None) or 1.0)


def softcap(config: Any) -> float | None:
    """Bound c of logits that some families squash as c·tanh(x/c)."""
    return getattr(config, "final_logit_softcapping", None)


def _head_forward(
    self: nn.Linear,
    hidden: Tensor,
    targets_T: Tensor | None = None,
    entropies: bool = True,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Any:
    if targets_T is None:
        return functional.linear(hidden, self.weight, self.bias)
    return HeadLogprobs.apply(hidden, self.weight, self.bias, targets_T, entropies, scale, softcap)


class HeadLogprobs(torch.autograd.Function):
    """Output head, log-softmax and pick in one, chunk by chunk: memory does not grow with tokens times vocabulary.

    forward(hidden [T, H], weight [V, H], bias [V] or None, targets [T], entropies, scale, softcap) gives logprobs and
    entropies (None unless asked for), both [T] float32, of softmax(scale·z) with z the logits, before it squashed to
    softcap·tanh(z/softcap). The matrix product runs in the model's type, everything after it in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets_T, entropies, scale, softcap):  # type: ignore[no-untyped-def]
        logprobs_T = torch.empty(len(targets_T), dtype=torch.float32, device=hidden.device)
        logsum_T = torch.empty_like(logprobs_T)
        entropy_T = torch.empty_like(logprobs_T) if entropies else None
        chunks = list(_chunks(len(targets_T), weight.shape[0]))
        logits = None
        for chunk in chunks:
            logits = _logits(hidden[chunk], weight, bias, scale, softcap)
            logsum = logits.logsumexp(-1)
            logsum_T[chunk] = logsum
            logprobs_T[chunk] = logits.gather(-1, targets_T[chunk, None])[:, 0] - logsum
            if entropy_T is not None:
                probabilities = (logits - logsum[:, None]).exp_()
                entropy_T[chunk] = logsum - torch.linalg.vecdot(probabilities, logits)
                del probabilities
        # A single chunk is kept for the backward pass: that is most steps of a small model.
        kept = logits if len(chunks) == 1 and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, bias, targets_T, logsum_T, entropy_T, kept)
        ctx.scale, ctx.softcap = scale, softcap
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T, grad_entropy_T):  # type: ignore[no-untyped-def]
        hidden, weight, bias, targets_T, logsum_T, entropy_T, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        has_entropy_grad = entropy_T is not None and bool(grad_entropy_T.any())
        for chunk in _chunks(len(targets_T), weight.shape[0]):
            logits = kept if kept is not None else _logits(hidden[chunk], weight, bias, ctx.scale, ctx.softcap)
            grad = logits - logsum_T[chunk, None]
            if has_entropy_grad:
                shift = (grad + entropy_T[chunk, None]).mul_(grad_entropy_T[chunk, None])
                grad.exp_().mul_(shift.add_(grad_logprobs_T[chunk, None])).neg_()
                del shift
            else:
                grad.exp_().mul_(-grad_logprobs_T[chunk, None])
            grad.scatter_add_(-1, targets_T[chunk, None], grad_logprobs_T[chunk, None])
            if ctx.softcap is not None:
                grad.mul_(1 - (logits / (ctx.scale * ctx.softcap)).square_())
            if ctx.scale != 1:
                grad.mul_(ctx.scale)
            grad = grad.to(weight.dtype)
            grad_hidden[chunk] = grad @ weight
            if ctx.needs_input_grad[1]:
                grad_weight = _accumulate(grad_weight, grad.T @ hidden[chunk])
            if bias is not None and ctx.needs_input_grad[2]:
                grad_bias = _accumulate(grad_bias, grad.sum(0))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum, in float32 as soon as there are two parts."""
    return part if total is None else total.float().add_(part)


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, LOGIT_BYTES // (4 * vocabulary))
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """[n, V] float32: scale times the (squashed) logits."""
    logits = functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.mul_(scale) if scale != 1 else logits


@contextmanager
def training(lm: nn.Module, checkpointing: bool) -> Iterator[None]:
    """The mode of an update; outside of it everything is in evaluation mode.

    Only adapters drop inputs here, as `model.lora.dropout` asks: every other dropout is 0. Gradient checkpointing acts
    in training mode alone, and there forgets key-value caches, which generation needs.
    """
    if checkpointing:
        lm.train()
    for module in lm.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.train()
    try:
        yield
    finally:
        lm.eval()
