"""Which logprob passes run, decided once; everything else is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pass:
    """Whether one inference pass runs, and a sentence why."""

    runs: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Passes:
    """What runs before the first update of a step."""

    old: Pass
    """Logprobs of the policy that the ratio is taken against."""
    reference: Pass
    """Logprobs of the policy that the KL is taken against."""
    entropies: Pass
    """Entropies of the policy before the update; with `old` they come from one forward."""

    @property
    def any(self) -> bool:
        return self.old.runs or self.reference.runs or self.entropies.runs


def decide_passes(cfg: Any) -> Passes:
    """The decision table of the logprob passes, for anything with the keys of a resolved config."""
    return Passes(old=_old_pass(cfg), reference=_reference_pass(cfg.loss), entropies=_entropy_pass(cfg.loss))


def _old_pass(cfg: Any) -> Pass:
    loss, trainer = cfg.loss, cfg.trainer
    threshold = loss.seq_logprob_error_threshold is not None
    if loss.force_on_policy_ratio:
        if threshold:
            return Pass(True, "loss.seq_logprob_error_threshold compares it with the sampler's; the ratio stays 1.")
        return Pass(False, "loss.force_on_policy_ratio: the ratio is 1 by definition.")
    if trainer.updates_per_step * trainer.epochs_per_step > 1:
        return Pass(True, "Several updates a step: from the second on the policy has moved away from it.")
    if loss.use_kl_in_reward and loss.kl_coef != 0:
        return Pass(True, "loss.use_kl_in_reward takes the KL between it and the reference.")
    if threshold:
        return Pass(True, "loss.seq_logprob_error_threshold compares it with the sampler's.")
    return Pass(False, "One update a step: the detached current logprobs are the old ones.")


def _reference_pass(loss: Any) -> Pass:
    if loss.kl_coef == 0:
        return Pass(False, "loss.kl_coef is 0: the reference model is never loaded.")
    where = "reward" if loss.use_kl_in_reward else "loss"
    return Pass(True, f"loss.kl_coef is {loss.kl_coef:g}: the KL in the {where} is taken against it.")


def _entropy_pass(loss: Any) -> Pass:
    if loss.top_entropy_quantile == 1:
        return Pass(False, "loss.top_entropy_quantile is 1: every token keeps its policy term.")
    return Pass(
        True, f"loss.top_entropy_quantile is {loss.top_entropy_quantile:g}: it selects tokens before the update."
    )
