"""The sync check: after each weight sync, engine and trainer must give a few fixed tokens the same logprobs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import GuardStop

if TYPE_CHECKING:
    import torch

    from grpo_cli.process.ranks import Ranks

Score = Callable[[list[int], list[int]], list[float]]
"""(prompt_ids, completion_ids) -> the engine's logprob of each completion token, temperature and all, in fp32."""

WeightGap = Callable[[str, "torch.Tensor"], "float | None"]
"""(HF name, the trainer's tensor) -> `relative_gap` to the tensor that the engine *computes with* (a packed copy
counts, not the parameter it was made from); None where the engine has no such tensor to show."""

_PROMPT_TOKENS = 2
_COMPLETION_TOKENS = 4
"""A forward of so few costs little more than one of a single pair: it is bound by the weights, not by the tokens."""
_ROUNDINGS = 2
"""Of engine and trainer each, one."""
_LOW_PRECISION = 10
"""In bfloat16 two right implementations differ by some tenths of a nat now and then (measured: 0.17 with vLLM on a 135M
model); so many tolerances are allowed where every weight is known to have arrived."""
_TEXT = "The sum of twelve and thirty is forty-two, and the check of it is short: 12 + 30 = 42. That is all there is."


def check_sync(
    policy: Any,
    ranks: Ranks,
    score: Score | None,
    weight_gap: WeightGap | None,
    tolerance: float,
    before_reading: Callable[[], None] | None = None,
    low_precision: bool = False,
) -> dict[str, float]:
    """Compare the engine's logprobs of the fixed tokens with the trainer's; every rank calls it.

    `score` is None on a rank that has no engine, `weight_gap` on one that cannot read the engine's weights. The largest
    gap over all ranks decides, so all of them return or all of them raise. `before_reading` is called on every rank
    once, only after a gap was found and before the first `weight_gap`.

    Beyond `tolerance` the trainer's own rounding is measured (`rounding`, nats): two right implementations in bfloat16
    differ by 0.13 nats on a 135M model, so `tolerance` counts beyond twice that rounding. In float32 it is 2e-5.

    With `low_precision` (one of the two computes in bfloat16) a larger gap passes where all weights are equal.

    Returns `sync/logprob_gap_max`, `time/sync_check` (seconds), and `sync/rounding_max` where it was measured. Raises
    GuardStop beyond both (a gap that is not a number is), naming the families of tensors that differ, and where the
    policy's own logprobs are not finite.
    """
    start = time.perf_counter()
    measured = _compared(policy, ranks, score, weight_gap, tolerance, before_reading, low_precision)
    return {**measured, "time/sync_check": time.perf_counter() - start}


def _compared(
    policy: Any,
    ranks: Ranks,
    score: Score | None,
    weight_gap: WeightGap | None,
    tolerance: float,
    before_reading: Callable[[], None] | None,
    low_precision: bool,
) -> dict[str, float]:
    prompt_ids, completion_ids = probe_tokens(policy.tokenizer)
    trainer = policy.score(prompt_ids, completion_ids)
    engine = trainer if score is None else score(prompt_ids, completion_ids)
    gap = largest(ranks.gather(logprob_gap(engine, trainer)))
    if gap <= tolerance:
        return {"sync/logprob_gap_max": gap}
    if not all(map(math.isfinite, trainer)):  # the same on every rank, as the weights are
        raise GuardStop(
            "The policy itself gives logprobs that are not finite: its weights have diverged. Try a lower trainer.lr, "
            "or a trainer.max_grad_norm; the last checkpoint is from before."
        )
    own = largest(ranks.gather(rounding(policy, prompt_ids, completion_ids, trainer)))
    if gap <= tolerance + _ROUNDINGS * own:
        return {"sync/logprob_gap_max": gap, "sync/rounding_max": own}
    if before_reading is not None:
        before_reading()
    found = ranks.gather(_differing_families(policy, weight_gap))
    readable = any(found_here is not None for found_here in found)
    if low_precision and readable and not _merged(found) and gap <= _LOW_PRECISION * tolerance:
        return {"sync/logprob_gap_max": gap, "sync/rounding_max": own}
    raise GuardStop(_explain(gap, tolerance, own, _merged(found), readable))


def rounding(policy: Any, prompt_ids: list[int], completion_ids: list[int], plain: list[float]) -> float:
    """Largest change, in nats, of the trainer's logprobs `plain` when more tokens stand behind the same ones.

    No token reads what follows it, so only the order of additions in the kernels can differ. Collective as `score`.
    """
    tokens = len(completion_ids)
    return largest([logprob_gap(policy.score(prompt_ids, completion_ids * times)[:tokens], plain) for times in (2, 3)])


def probe_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The fixed tokens, (prompt_ids, completion_ids): the beginning of a sentence, repeated where it is short."""
    token_ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    assert token_ids, "a tokenizer that gives no token for an English sentence"
    needed = _PROMPT_TOKENS + _COMPLETION_TOKENS
    token_ids = (token_ids * needed)[:needed]
    return token_ids[:_PROMPT_TOKENS], token_ids[_PROMPT_TOKENS:]


def logprob_gap(engine: list[float], trainer: list[float]) -> float:
    """Largest absolute difference in nats; NaN where one of them is not finite or a token is missing."""
    if len(engine) != len(trainer):
        return float("nan")
    return largest([abs(one - other) for one, other in zip(engine, trainer, strict=True)])


def largest(values: list[float]) -> float:
    """The maximum, where one NaN makes it NaN (`max` would depend on the order)."""
    return next((value for value in values if value != value), max(values, default=0.0))


def relative_gap(trainer: torch.Tensor, engine: torch.Tensor) -> float:
    """max|trainer - engine| / max|engine|, both in the engine's dtype: 0 when the engine holds what it was sent.

    1.0 where the shapes differ.
    """
    if trainer.shape != engine.shape:
        return 1.0
    expected = trainer.detach().to(device=engine.device, dtype=engine.dtype).float()
    difference = (expected - engine.detach().float()).abs().max().item()
    return difference / max(engine.detach().abs().max().item(), 1e-12)


def family(name: str) -> str:
    """A tensor's name without its layer number.

    >>> family("model.layers.12.self_attn.q_proj.weight")
    'model.layers.*.self_attn.q_proj.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def named_weights(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by HF name, layer by layer on all ranks; a tied one (the output head) also by its second name."""
    second_names: dict[str, list[str]] = {}
    for copy, source in tied_weights(policy.module).items():
        second_names.setdefault(source, []).append(copy)
    for name, tensor in policy.gathered_parameters():
        yield name, tensor
        for copy in second_names.get(name, ()):
            yield copy, tensor


def tied_weights(module: Any) -> dict[str, str]:
    """Second name -> first name of the weights that the model's config ties, such as the output head's."""
    tied = getattr(module, "_tied_weights_keys", None)
    if not isinstance(tied, dict) or not getattr(module.config, "tie_word_embeddings", False):
        return {}
    return tied


def _differing_families(policy: Any, weight_gap: WeightGap | None) -> dict[str, float] | None:
    """Family -> largest relative gap of its tensors, for those that differ; None where no weight can be read.

    Walks through all weights even where nothing is compared: gathering them takes every rank.
    """
    differing: dict[str, float] = {}
    readable = False
    for name, tensor in named_weights(policy):
        gap = None if weight_gap is None else weight_gap(name, tensor)
        readable = readable or gap is not None
        if gap is not None and not gap <= 0.0:
            differing[family(name)] = largest([gap, differing.get(family(name), 0.0)])
    return differing if readable else None


def _merged(found: list[dict[str, float] | None]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for differing in found:
        for name, gap in (differing or {}).items():
            merged[name] = largest([gap, merged.get(name, 0.0)])
    return merged


def _explain(gap: float, tolerance: float, own: float, differing: dict[str, float], readable: bool) -> str:
    head = (
        f"sync check: the engine's logprobs differ from the trainer's by {gap:.3g} nats after the weight sync "
        f"(rollout.sync_tolerance={tolerance:g}, the trainer's own rounding {own:.2g})."
    )
    if differing:
        worst = sorted(differing.items(), key=lambda item: (item[1] == item[1], -item[1]))
        names = ", ".join(f"{name} (by {value:.2g} of its largest value)" for name, value in worst[:5])
        more = f" and {len(worst) - 5} more families" if len(worst) > 5 else ""
        return f"{head} Weights that differ: {names}{more}. The engine would sample from a stale policy."
    if readable:
        return f"{head} All weights are equal: a cache, a dtype or a kernel differs (rollout.dtype, model.dtype)."
    return f"{head} The engine's weights cannot be read from here."
