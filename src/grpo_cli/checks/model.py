"""Rules of the model and its adapter."""

from __future__ import annotations

from typing import Any

from grpo_cli.checks.engine import Found, View, broken, declare, error, gt, lt, state, warning

LOCAL_SIGNS = ("/", ".", "~")
"""First characters of a path on this machine."""

BUILT_IN = "builtin:"


def is_local(path: str) -> bool:
    """Whether a model path is a directory here or a built-in model, and not the id of a hub model."""
    return path.startswith((*LOCAL_SIGNS, BUILT_IN))


@error("model.path")
def model_path_given(c: View) -> Found:
    """Without a model the loader of every process fails."""
    if not c.model.path:
        yield broken(f"{state(c, 'model.path')} names no model.", {"model.path": "builtin:smollm2-135m"})


@error("model.dtype", "model.attn_implementation")
def flash_attention_needs_bfloat16(c: View) -> Found:
    """The kernel refuses float32 at the first forward."""
    if _is_flash(c) and c.model.dtype == "float32":
        yield broken(
            f"{state(c, 'model.attn_implementation')} refuses model.dtype=float32.",
            {"model.dtype": "bfloat16"},
            {"model.attn_implementation": "sdpa"},
        )


@error("model.attn_implementation", "trainer.packing")
def shared_prefix_needs_mask_attention(c: View) -> Found:
    """packing=shared_prefix hides the completions of a prompt from each other by a mask. The flash_attention kernels
    take no such mask: completions would read each other."""
    if c.trainer.packing == "shared_prefix" and _is_flash(c):
        yield broken(
            f"trainer.packing=shared_prefix needs a mask that {state(c, 'model.attn_implementation')} does not take.",
            {"model.attn_implementation": "sdpa"},
            {"trainer.packing": "sequence"},
        )


@error("model.lora.rank", "model.lora.alpha", "model.lora.dropout", "model.lora.target_modules")
def lora_values_in_range(c: View) -> Found:
    """Out of range the adapter has no effect, or crashes when it is built."""
    lora = c.model.lora
    if lora is None:
        return
    wrong: dict[str, Any] = {}
    if lt(lora.rank, 1):
        wrong["model.lora.rank"] = 16
    if not gt(lora.alpha, 0):
        wrong["model.lora.alpha"] = 32.0
    if lt(lora.dropout, 0) or not lt(lora.dropout, 1):
        wrong["model.lora.dropout"] = 0.0
    if not lora.target_modules:
        wrong["model.lora.target_modules"] = ["q_proj", "v_proj"]
    if wrong:
        ranges = "rank >= 1, alpha > 0, dropout in [0, 1), target_modules not empty"
        yield broken(f"{state(c, *wrong)} is out of range: {ranges}.", wrong)


@warning("model.lora.dropout")
def lora_dropout_is_zero(c: View) -> Found:
    """With dropout the training logprobs are noisy and the sampling ones are not: ratios leave 1 at once."""
    if c.model.lora is not None and gt(c.model.lora.dropout, 0) and lt(c.model.lora.dropout, 1):
        yield broken(
            f"{state(c, 'model.lora.dropout')} makes training logprobs noisy, so ratios leave 1 at once.",
            {"model.lora.dropout": 0.0},
        )


@error("model.revision", "model.path")
def revision_needs_hub_model(c: View) -> Found:
    """A directory and a built-in model have no revisions; the pin would do nothing."""
    if c.model.revision is not None and c.model.path and is_local(c.model.path):
        message = f"{state(c, 'model.revision')} does nothing for {state(c, 'model.path')}."
        yield broken(message, {"model.revision": None})


def _is_flash(c: View) -> bool:
    return c.model.attn_implementation.startswith("flash_attention")


declare(
    "model_readable", "error", "model", "start", "model.path", "model.revision",
    why="""model.path has no readable config and tokenizer: every process would fail while loading, after the launch.
    Correct model.path or model.revision.""",
)  # fmt: skip
declare(
    "attention_installed", "error", "model", "start", "model.attn_implementation",
    why="""The package behind model.attn_implementation cannot be found: an import error while the weights load.
    Install it, or set model.attn_implementation=sdpa.""",
)  # fmt: skip
declare(
    "lora_targets_exist", "error", "model", "start", "model.lora.target_modules", "model.path",
    why="""An entry of model.lora.target_modules matches no module of the model. That adapter would never be created:
    less is trained than asked. Use the module names in the message.""",
)  # fmt: skip
