"""Token losses and their sum: ratio, surrogate, weights, KL, aggregation weights, entropy bonus."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_cli.loss.measures import Measures
from grpo_cli.loss.surrogates import SURROGATES, Inputs, Surrogate
from grpo_cli.loss.tokens import Tokens
from grpo_cli.schema import Config, Correction

KL_CLAMP = 20.0

# d = ref - lp (arXiv 2402.03300 Eq. 4 is k3; names after Schulman, "Approximating KL divergence", 2020).
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(d) - d,
}

# log weight of each token from the log gap old - sampler: its own, the sum or the mean of its sequence.
CORRECTION_LEVELS: dict[str, Callable[[Tensor, Tokens], Tensor]] = {
    "token": lambda gap_T, tokens: gap_T,
    "sequence": lambda gap_T, tokens: tokens.sum_N(gap_T)[tokens.seq_T],
    "geometric": lambda gap_T, tokens: tokens.mean_N(gap_T)[tokens.seq_T],
}


class Weights(NamedTuple):
    """Correction weights of the policy term, without gradient."""

    raw_T: Tensor
    """[T] float64 exp(old - sampler) at the asked level."""
    used_T: Tensor
    """[T] what multiplies the policy term."""
    low_T: Tensor
    """[T] bool: below the lower bound."""
    high_T: Tensor
    """[T] bool: above the upper bound."""


def policy_loss(logprobs_T: Tensor, entropy_T: Tensor | None, tokens: Tokens, cfg: Config) -> tuple[Tensor, Measures]:
    """This micro-batch's share of the update's loss: adding up micro-batches and ranks gives the loss of the update.

    Args:
        logprobs_T: [T] current logprobs (logits divided by the temperature), with gradient.
        entropy_T: [T] current entropy in nats, with gradient when `entropy_coef` is not 0; None: not computed.
        tokens: what `prepare` has filled in.
        cfg: the whole config; `cfg.loss` is read.

    Returns:
        The scalar loss and the measures of this micro-batch.
    """
    loss_T, measures = token_losses(logprobs_T, entropy_T, tokens, cfg)
    return loss_T.sum(), measures


def token_losses(logprobs_T: Tensor, entropy_T: Tensor | None, tokens: Tokens, cfg: Config) -> tuple[Tensor, Measures]:
    """[T] contribution of each token to the update's loss, and the measures; arguments as for `policy_loss`."""
    assert tokens.advantage_T is not None, "prepare() comes first"
    assert tokens.weight_T is not None, "prepare() comes first"
    loss, trained_T = cfg.loss, tokens.trained_T
    # Zeros before any exp: a masked sequence may hold gaps whose exp overflows, and 0 x inf would reach the gradient.
    current_T = torch.where(trained_T, logprobs_T, 0.0)
    proximal_T = logprobs_T.detach() if tokens.old_T is None else tokens.old_T
    anchor_T = logprobs_T.detach() if loss.force_on_policy_ratio else proximal_T
    log_ratio_T = torch.where(trained_T, logprobs_T - anchor_T, 0.0)

    surrogate = SURROGATES[loss.name](Inputs(current_T, log_ratio_T, tokens.advantage_T, tokens), loss)
    term_T, weights = surrogate.value_T, None
    if loss.correction.mode != "none":
        weights = correction_weights(proximal_T.detach(), tokens, loss.correction)
        term_T = weights.used_T * term_T
    if tokens.policy_T is not None:
        term_T = tokens.policy_T * term_T
    if loss.kl_coef != 0 and not loss.use_kl_in_reward:
        assert tokens.ref_T is not None, "decide_passes() runs the reference pass"
        gap_T = torch.where(trained_T, tokens.ref_T - logprobs_T, 0.0).clamp(-KL_CLAMP, KL_CLAMP)
        term_T = term_T + loss.kl_coef * KL_ESTIMATORS[loss.kl_estimator](gap_T)
    loss_T = tokens.weight_T * term_T
    if loss.entropy_coef != 0:
        assert entropy_T is not None, "entropy_coef needs the entropy of the current policy"
        bonus_T = torch.where(trained_T, entropy_T, 0.0) / max(tokens.update_tokens, 1)
        loss_T = loss_T - loss.entropy_coef * bonus_T
    return loss_T, _measure(logprobs_T, entropy_T, tokens, cfg, surrogate, weights)


def correction_weights(proximal_T: Tensor, tokens: Tokens, correction: Correction) -> Weights:
    """Importance weights between rollout engine and trainer.

    Truncated importance sampling (Yao et al., fengyao.notion.site/off-policy-rl), masked as in IcePop
    (ringtech.notion.site/icepop).

    Args:
        proximal_T: [T] logprobs of the policy that the ratio is taken against, without gradient.
        tokens: their sampler logprobs.
        correction: mode, level and bounds; a null bound does nothing (truncate: 0 below).
    """
    assert tokens.sampler_T is not None, "every rollout records the sampler's logprobs"
    gap_T = torch.where(tokens.trained_T, proximal_T - tokens.sampler_T, 0.0)
    raw_T = CORRECTION_LEVELS[correction.level](gap_T.double(), tokens).exp()  # the sum of a long sequence is large
    low = 0.0 if correction.low is None else correction.low
    high = torch.inf if correction.high is None else correction.high
    low_T, high_T = raw_T < low, raw_T > high
    used_T = raw_T.clamp(low, high) if correction.mode == "truncate" else raw_T.masked_fill(low_T | high_T, 0.0)
    return Weights(raw_T, used_T.to(gap_T.dtype), low_T, high_T)


@torch.no_grad()
def _measure(
    logprobs_T: Tensor,
    entropy_T: Tensor | None,
    tokens: Tokens,
    cfg: Config,
    surrogate: Surrogate,
    weights: Weights | None,
) -> Measures:
    """Raw, unclipped, over trained tokens. A token is clipped where the bound changed its gradient, so it has one."""
    measures, trained_T = Measures(), tokens.trained_T
    if surrogate.ratio_T is not None:
        measures.mean("ratio/mean", surrogate.ratio_T, trained_T)
        measures.lowest("ratio/min", surrogate.ratio_T, trained_T)
        measures.highest("ratio/max", surrogate.ratio_T, trained_T)
    has_gradient_T = trained_T if weights is None else trained_T & (weights.used_T != 0)
    if tokens.policy_T is not None:
        has_gradient_T = has_gradient_T & (tokens.policy_T != 0)
    for side, clipped_T in surrogate.clipped.items():
        measures.mean(f"clip_frac/{side}", (clipped_T & has_gradient_T).double(), trained_T)
    if entropy_T is not None:
        measures.mean("entropy", entropy_T, trained_T)
    if tokens.ref_T is not None:
        gap_T = (tokens.ref_T - logprobs_T).double()
        measures.mean("kl", KL_ESTIMATORS[cfg.loss.kl_estimator](gap_T), trained_T)
    if weights is not None:
        measures.mean("correction/weight_mean", weights.raw_T, trained_T)
        measures.lowest("correction/weight_min", weights.raw_T, trained_T)
        measures.highest("correction/weight_max", weights.raw_T, trained_T)
        measures.mean("correction/low_frac", weights.low_T.double(), trained_T)
        measures.mean("correction/high_frac", weights.high_T.double(), trained_T)
    if tokens.sampler_T is not None:
        gap_T = (tokens.sampler_T - (logprobs_T if tokens.old_T is None else tokens.old_T)).abs()
        measures.mean("sampling/logprob_gap_mean", gap_T, trained_T)
        measures.highest("sampling/logprob_gap_max", gap_T, trained_T)
    return measures
