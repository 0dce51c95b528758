"""The completion tokens of a micro-batch, end to end: what the loss reads and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Combines a tensor over all ranks, element by element (sum, unless said); the identity in one process."""


@dataclass(slots=True)
class Tokens:
    """The T completion tokens of N whole sequences, end to end; no padding, prompts left out.

    >>> Tokens(
    ...     seq_T=torch.tensor([0, 0, 0, 2]),  # three tokens, an empty completion, one token
    ...     length_N=torch.tensor([3, 0, 1]),
    ...     trained_N=torch.tensor([True, True, False]),
    ...     advantage_N=torch.tensor([0.7, -0.7, 0.0]),
    ... ).trained_T.tolist()
    [True, True, True, False]
    """

    seq_T: Tensor
    """[T] int64, sequence of each token, 0..N-1, non-decreasing."""
    length_N: Tensor
    """[N] int64, tokens of each sequence; 0 is possible."""
    trained_N: Tensor
    """[N] bool: scored, in a kept group, not cut by `mask_truncated`. `prepare` clears it over the error threshold."""
    advantage_N: Tensor
    """[N] float, one number a completion; for the whitened estimators the value before whitening."""
    sampler_T: Tensor | None = None
    """[T] logprobs of the rollout engine; None: nothing reads them."""
    old_T: Tensor | None = None
    """[T] logprobs of the policy at the start of the step; None: the pass was skipped."""
    ref_T: Tensor | None = None
    """[T] logprobs of the reference policy; None: the pass was skipped."""
    entropy_T: Tensor | None = None
    """[T] entropy in nats of the policy before the update; read when `top_entropy_quantile` < 1."""
    advantage_T: Tensor | None = None
    """[T] set by `prepare`: after KL in the reward, whitening and clamp; 0 where nothing is trained."""
    weight_T: Tensor | None = None
    """[T] set by `prepare`: the loss is the sum of weight x token loss over micro-batches and ranks of the update."""
    policy_T: Tensor | None = None
    """[T] 0 or 1, set by `prepare` when `top_entropy_quantile` < 1: tokens that keep the policy term; None: all."""
    update_tokens: int = 0
    """Set by `prepare`: trained tokens of the whole update over all ranks; 0: nothing to learn, no optimizer step."""

    @property
    def trained_T(self) -> Tensor:
        """[T] bool: the token belongs to a trained sequence."""
        return self.trained_N[self.seq_T]

    def sum_N(self, values_T: Tensor) -> Tensor:
        """[N] sum over the tokens of each sequence; 0 for an empty one. Deterministic, differentiable."""
        return torch.segment_reduce(values_T, "sum", lengths=self.length_N, unsafe=True)

    def mean_N(self, values_T: Tensor) -> Tensor:
        """[N] mean over the tokens of each sequence; 0 for an empty one."""
        return self.sum_N(values_T) / self.length_N.clamp(min=1)
