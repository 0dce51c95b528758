"""From logits to one token a row and its logprob: pure functions on tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_cli.rollout.sampling import Sampling

_BELOW_ONE = 1.0 - 1e-12
"""Largest uniform used: times the total mass it stays below it, so a token of positive probability is always found."""

_ROUNDING = 1e-6
"""Slack of the top_p comparison: 0.5 + 0.3 must count as 0.8 in float32 too."""


def draw(logits_BV: Tensor, uniform_B: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token a row and its logprob under the distribution that it was drawn from.

    logits_BV: any float type; computed in float32. uniform_B: float64 in [0, 1), read by inverse CDF in the order of
    the vocabulary, so that a token depends on its row's number and probabilities alone; None when greedy.

    Returns tokens_B (long) and logprobs_B (float32): after temperature, renormalised over the tokens that top_p, top_k
    and min_p leave; when greedy, of the untempered distribution.
    """
    if sampling.greedy or uniform_B is None:
        logprobs_BV = torch.log_softmax(logits_BV.float(), dim=-1)
        logprobs_B, tokens_B = logprobs_BV.max(dim=-1)
        return tokens_B, logprobs_B
    scaled_BV = logits_BV.float() / sampling.temperature
    if sampling.truncated:
        scaled_BV = truncate(scaled_BV, sampling)
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    # float64: a float32 running sum over a large vocabulary is off by more than a rare token's probability.
    mass_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    target_B1 = uniform_B.clamp(max=_BELOW_ONE).unsqueeze(1) * mass_BV[:, -1:]
    tokens_B1 = torch.searchsorted(mass_BV, target_B1, right=True)
    return tokens_B1.squeeze(1), logprobs_BV.gather(1, tokens_B1).squeeze(1)


def truncate(scaled_BV: Tensor, sampling: Sampling) -> Tensor:
    """Set the logits to -inf that min_p, then top_k, then top_p exclude (the order in which engines apply them).

    Tokens of equal logit share their fate under top_k, so that it may keep more than k.
    """
    if sampling.min_p:
        floor_B1 = scaled_BV.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scaled_BV = scaled_BV.masked_fill(scaled_BV < floor_B1, -math.inf)
    if sampling.top_k and 0 < sampling.top_k < scaled_BV.shape[-1]:
        kth_B1 = scaled_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < kth_B1, -math.inf)
    if sampling.top_p < 1:
        sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True)
        probs_BV = sorted_BV.softmax(dim=-1)
        before_BV = probs_BV.cumsum(dim=-1, dtype=torch.float64) - probs_BV
        outside_BV = before_BV >= sampling.top_p - _ROUNDING
        outside_BV[:, 0] = False  # the likeliest token always stays
        scaled_BV = scaled_BV.masked_fill(outside_BV.gather(1, order_BV.argsort(dim=-1)), -math.inf)
    return scaled_BV
