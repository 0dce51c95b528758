"""What a whole step must know before its first token loss: masks, token advantages, and each token's share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_cli.loss.objective import KL_CLAMP, KL_ESTIMATORS
from grpo_cli.loss.tokens import Reduce, Tokens
from grpo_cli.schema import Config, Loss

MIN_VARIANCE = 1e-8
ROUNDING = 64 * torch.finfo(torch.float64).eps

# Share of each token of a sequence in the loss, from the sequence's length [N], and the trained tokens and sequences
# of the whole update. An empty sequence has no token to carry its share.
AGGREGATIONS: dict[str, Callable[[Tensor, int, int, Loss], Tensor]] = {
    "token_mean": lambda length_N, tokens, sequences, loss: torch.full_like(length_N, 1 / tokens),
    "seq_mean_token_mean": lambda length_N, tokens, sequences, loss: 1 / (sequences * length_N),
    "seq_mean_token_sum": lambda length_N, tokens, sequences, loss: torch.full_like(length_N, 1 / sequences),
    "constant": lambda length_N, tokens, sequences, loss: torch.full_like(length_N, 1 / sequences / _constant(loss)),
}


def prepare(updates: list[list[Tokens]], cfg: Config, reduce: Reduce) -> dict[str, float]:
    """Fill in, in place, what the loss of every token needs to know of the whole step.

    Args:
        updates: `updates[u]` are this rank's micro-batches of optimizer update u; all ranks have as many updates.
        cfg: the whole config; `cfg.loss` and `cfg.advantage` are read.
        reduce: sum over all ranks. Every rank calls it equally often, also one that has no token.

    Returns:
        Metrics of the step, without keys that were not measured.
    """
    step = [tokens for update in updates for tokens in update]
    metrics: dict[str, float] = {}
    if cfg.loss.seq_logprob_error_threshold is not None:
        metrics |= _mask_errors(step, cfg.loss.seq_logprob_error_threshold, reduce)
    if cfg.whitens_advantage:
        _whiten(step, cfg, reduce)
    else:
        for tokens in step:
            tokens.advantage_T = (tokens.advantage_N * tokens.trained_N)[tokens.seq_T]
    counts = _share_out(updates, cfg, reduce)
    metrics["loss/tokens_count"] = float(sum(counts))
    if cfg.loss.top_entropy_quantile < 1:
        _select_by_entropy(updates, counts, cfg.loss.top_entropy_quantile, reduce)
    return metrics


def _constant(loss: Loss) -> int:
    assert loss.constant_length is not None, "rule constant_aggregation_needs_length"
    return loss.constant_length


def sequence_errors(tokens: Tokens) -> Tensor:
    """[N] mean over the tokens of exp|sampler - old|; 0 for an empty sequence."""
    assert tokens.sampler_T is not None, "every rollout records the sampler's logprobs"
    assert tokens.old_T is not None, "decide_passes() runs the old pass for the error threshold"
    return tokens.mean_N((tokens.sampler_T - tokens.old_T).double().abs().exp())


def _mask_errors(step: list[Tokens], threshold: float, reduce: Reduce) -> dict[str, float]:
    """Stop training sequences whose error exceeds `threshold`."""
    sums = _zeros(step, 3)
    for tokens in step:
        counted_N = tokens.trained_N & (tokens.length_N > 0)
        error_N = sequence_errors(tokens)
        over_N = counted_N & (error_N > threshold)
        tokens.trained_N = tokens.trained_N & ~over_N
        sums += torch.stack([counted_N.sum(), over_N.sum(), torch.where(counted_N, error_N, 0.0).sum()])
    count, over, error = reduce(sums).tolist()
    if not count:
        return {}
    return {"sampling/sequence_error_mean": error / count, "sampling/sequence_masked_frac": over / count}


def _whiten(step: list[Tokens], cfg: Config, reduce: Reduce) -> None:
    """(x - mean) / sqrt(max(var, 1e-8)) over the trained tokens of the step, ddof 0; then the clamp.

    REINFORCE++, arXiv 2501.03262 section 3.
    """
    values = [_token_values(tokens, cfg) for tokens in step]
    sums = _zeros(step, 3)
    for tokens, value_T in zip(step, values, strict=True):
        sums += torch.stack([tokens.trained_T.sum(), value_T.sum(), value_T.abs().sum()])
    count, total, size = reduce(sums).tolist()
    mean = total / max(count, 1)
    squares = _zeros(step, 1)
    for tokens, value_T in zip(step, values, strict=True):
        squares += torch.where(tokens.trained_T, value_T - mean, 0.0).square().sum()
    deviation = math.sqrt(reduce(squares).item() / max(count, 1))
    # Equal values differ from their rounded mean by a few units in the last place: that is no signal.
    scale = 0.0 if deviation <= ROUNDING * size / max(count, 1) else 1 / max(deviation, math.sqrt(MIN_VARIANCE))
    clip = math.inf if cfg.advantage.clip is None else cfg.advantage.clip
    for tokens, value_T in zip(step, values, strict=True):
        white_T = ((value_T - mean) * scale).clamp(-clip, clip)
        tokens.advantage_T = torch.where(tokens.trained_T, white_T, 0.0).to(tokens.advantage_N.dtype)


def _token_values(tokens: Tokens, cfg: Config) -> Tensor:
    """[T] float64 advantage before whitening, less the KL still to come in the sequence (arXiv 2501.03262 Eq. 8)."""
    value_T = (tokens.advantage_N.double() * tokens.trained_N)[tokens.seq_T]
    if cfg.loss.kl_coef == 0 or not cfg.loss.use_kl_in_reward:
        return value_T
    assert tokens.old_T is not None, "rule kl_in_reward_needs_prev_logprobs"
    assert tokens.ref_T is not None, "decide_passes() runs the reference pass"
    gap_T = torch.where(tokens.trained_T, (tokens.ref_T - tokens.old_T).double(), 0.0)
    kl_T = KL_ESTIMATORS[cfg.loss.kl_estimator](gap_T.clamp(-KL_CLAMP, KL_CLAMP))
    so_far_T = kl_T.cumsum(0)
    end_T = tokens.length_N.cumsum(0)[tokens.seq_T] - 1
    return value_T - cfg.loss.kl_coef * (so_far_T[end_T] - so_far_T + kl_T)


def _share_out(updates: list[list[Tokens]], cfg: Config, reduce: Reduce) -> list[int]:
    """Set `weight_T` and `update_tokens`; returns the trained tokens of each update over all ranks."""
    counts = _zeros([tokens for update in updates for tokens in update], len(updates), 2)
    for row, update in zip(counts, updates, strict=True):
        for tokens in update:
            row += torch.stack([tokens.trained_T.sum(), (tokens.trained_N & (tokens.length_N > 0)).sum()])
    totals = [(round(token_count), round(sequences)) for token_count, sequences in reduce(counts).tolist()]
    share = AGGREGATIONS[cfg.loss.aggregation]
    for update, (token_count, sequences) in zip(updates, totals, strict=True):
        for tokens in update:
            tokens.update_tokens = token_count
            share_N = share(tokens.length_N.clamp(min=1).double(), max(token_count, 1), max(sequences, 1), cfg.loss)
            tokens.weight_T = (share_N * tokens.trained_N).to(tokens.advantage_N.dtype)[tokens.seq_T]
    return [token_count for token_count, _ in totals]


def _select_by_entropy(updates: list[list[Tokens]], counts: list[int], share: float, reduce: Reduce) -> None:
    """Keep the policy term of the trained tokens at or above the (1 - `share`) quantile of their update's entropies.

    arXiv 2506.01939 section 5. The tokens at or above the interpolated quantile are those at or above the entropy of
    rank ceil((1 - share)(n - 1)); bisection over the bits of a float64, whose order is that of the numbers, finds it
    exactly, with sums over ranks alone.
    """
    device = _zeros([tokens for update in updates for tokens in update], 0).device
    rank_U = torch.tensor([math.ceil((1 - share) * (count - 1) - 1e-9) for count in counts], device=device)
    bits = [[(_entropy_bits(tokens), tokens.trained_T) for tokens in update] for update in updates]
    low_U = torch.zeros(len(updates), dtype=torch.int64, device=device)
    high_U = torch.full_like(low_U, torch.tensor(math.inf, dtype=torch.float64).view(torch.int64).item())
    for _ in range(63):
        middle_U = low_U + (high_U - low_U) // 2
        below_U = torch.zeros(len(updates), dtype=torch.float64, device=device)
        for u, pairs in enumerate(bits):
            for bits_T, trained_T in pairs:
                below_U[u] += ((bits_T <= middle_U[u]) & trained_T).sum()
        enough_U = reduce(below_U) > rank_U
        low_U, high_U = torch.where(enough_U, low_U, middle_U + 1), torch.where(enough_U, middle_U, high_U)
    for u, (update, update_bits) in enumerate(zip(updates, bits, strict=True)):
        for tokens, (bits_T, _) in zip(update, update_bits, strict=True):
            tokens.policy_T = (bits_T >= high_U[u]).to(tokens.advantage_N.dtype)


def _entropy_bits(tokens: Tokens) -> Tensor:
    """[T] int64 in the order of the entropies; rounding below zero counts as zero."""
    assert tokens.entropy_T is not None, "top_entropy_quantile < 1 needs the entropy before the update"
    return tokens.entropy_T.detach().double().clamp(min=0.0).abs().view(torch.int64)


def _zeros(step: list[Tokens], *shape: int) -> Tensor:
    """Float64 zeros where the tokens are: what is summed over ranks is exact up to 2**53."""
    return torch.zeros(*shape, dtype=torch.float64, device=step[0].seq_T.device if step else None)
