"""The surrogates: what each token's policy term is, to be minimised. One function and one YAML file a surrogate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_cli.loss.tokens import Tokens
from grpo_cli.schema import Loss

MAX_LOG_RATIO = 80.0
"""Near the end of float32, and far beyond any ratio that means something."""


class Inputs(NamedTuple):
    """What a surrogate reads; untrained tokens hold logprob 0, log ratio 0 and advantage 0."""

    logprobs_T: Tensor
    """[T] current logprobs, with gradient."""
    log_ratio_T: Tensor
    """[T] current minus old logprobs, with gradient."""
    advantage_T: Tensor
    """[T] advantages."""
    tokens: Tokens


class Surrogate(NamedTuple):
    """A surrogate's value and what it was made of."""

    value_T: Tensor
    """[T] the policy term, to be minimised."""
    ratio_T: Tensor | None
    """[T] the raw, unclipped ratio; None: this surrogate has none."""
    clipped: dict[str, Tensor]
    """Side (low, high, dual) to [T] bool: tokens whose gradient that bound changed. Empty: it never clips."""


SurrogateFunction = Callable[[Inputs, Loss], Surrogate]


def importance_ratio(inputs: Inputs, level: str) -> Tensor:
    """[T] exp(lp - old) of each token, or, by sequence, exp of its mean over the sequence on every token (GSPO)."""
    if level == "token":
        return bounded_exp(inputs.log_ratio_T)
    return bounded_exp(inputs.tokens.mean_N(inputs.log_ratio_T))[inputs.tokens.seq_T]


def bounded_exp(log_T: Tensor) -> Tensor:
    """exp, at most e^80: an infinite ratio times the 0 of a clip, a mask or an advantage would be no number."""
    return log_T.clamp(max=MAX_LOG_RATIO).exp()


def ppo_clip(inputs: Inputs, loss: Loss) -> Surrogate:
    """max(-rA, -clip(r)A), for A < 0 at most -cA with `dual_clip` c (arXiv 1707.06347 Eq. 7; 1912.09729).

    With `ratio_level` sequence it is GSPO (arXiv 2507.18071 Eq. 5).
    """
    advantage_T = inputs.advantage_T
    ratio_T = importance_ratio(inputs, loss.ratio_level)
    bounded_T, low_T, high_T = _clip(ratio_T, loss)
    value_T = torch.maximum(-ratio_T * advantage_T, -bounded_T * advantage_T)
    clipped = {"low": low_T & (advantage_T < 0), "high": high_T & (advantage_T > 0)}
    if loss.dual_clip is not None:
        value_T = torch.where(advantage_T < 0, torch.minimum(value_T, -loss.dual_clip * advantage_T), value_T)
        clipped["dual"] = (ratio_T > loss.dual_clip) & (advantage_T < 0)
    return Surrogate(value_T, ratio_T, clipped)


def cispo(inputs: Inputs, loss: Loss) -> Surrogate:
    """-sg(clip(r)) A lp: a clipped token keeps a gradient, with the bound for its weight (arXiv 2506.13585 Eq. 4)."""
    ratio_T = importance_ratio(inputs, "token")
    weight_T, low_T, high_T = _clip(ratio_T.detach(), loss)
    signal_T = inputs.advantage_T != 0
    value_T = -weight_T * inputs.advantage_T * inputs.logprobs_T
    return Surrogate(value_T, ratio_T, {"low": low_T & signal_T, "high": high_T & signal_T})


def gmpo(inputs: Inputs, loss: Loss) -> Surrogate:
    """-A exp(mean of log ratios), each clamped on the side that A pessimises (arXiv 2507.20673).

    The bounds are those of the log ratio: [-clip_low, clip_high]. The value of a sequence stands on each of its tokens.
    """
    log_T, advantage_T, tokens = inputs.log_ratio_T, inputs.advantage_T, inputs.tokens
    low = -torch.inf if loss.clip_low is None else -loss.clip_low
    high = torch.inf if loss.clip_high is None else loss.clip_high
    clamped_T = torch.where(advantage_T > 0, log_T.clamp(max=high), log_T.clamp(min=low))
    value_T = -advantage_T * bounded_exp(tokens.mean_N(clamped_T))[tokens.seq_T]
    clipped = {"low": (log_T < low) & (advantage_T < 0), "high": (log_T > high) & (advantage_T > 0)}
    return Surrogate(value_T, bounded_exp(log_T), clipped)


def sapo(inputs: Inputs, loss: Loss) -> Surrogate:
    """-(4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate instead of a clip (arXiv 2511.20347)."""
    advantage_T = inputs.advantage_T
    ratio_T = importance_ratio(inputs, "token")
    assert loss.tau_pos is not None, "rule sapo_taus_positive"
    assert loss.tau_neg is not None, "rule sapo_taus_positive"
    # Of tensors: of two plain numbers torch makes float32, whatever the ratio is.
    tau_T = torch.where(advantage_T > 0, ratio_T.new_tensor(loss.tau_pos), ratio_T.new_tensor(loss.tau_neg))
    return Surrogate(-4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantage_T, ratio_T, {})


def reinforce(inputs: Inputs, loss: Loss) -> Surrogate:
    """-A lp: the plain policy gradient, which reads no ratio."""
    return Surrogate(-inputs.advantage_T * inputs.logprobs_T, None, {})


def _clip(ratio_T: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """The ratio inside [1 - clip_low, 1 + clip_high], and where it was below and above; a null bound does nothing."""
    low = -torch.inf if loss.clip_low is None else 1 - loss.clip_low
    high = torch.inf if loss.clip_high is None else 1 + loss.clip_high
    return ratio_T.clamp(low, high), ratio_T < low, ratio_T > high


SURROGATES: dict[str, SurrogateFunction] = {
    "ppo_clip": ppo_clip,
    "dapo": ppo_clip,
    "dr_grpo": ppo_clip,
    "gspo": ppo_clip,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "reinforce": reinforce,
}
