"""How tokens are drawn, and which of them end a completion: the same words for every backend. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_cli.schema import Config
from grpo_cli.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Sampling:
    """Completions a prompt and how each is drawn.

    >>> Sampling(n=8, max_new_tokens=24, temperature=1.0, top_p=0.9).truncated
    True
    """

    n: int
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    """None, 0 or -1 is off."""
    min_p: float | None = None
    """None or 0 is off."""
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn, so that sampler logprobs are renormalised over the others."""
        return self.top_p < 1 or bool(self.top_k and self.top_k > 0) or bool(self.min_p)

    @classmethod
    def of_rollout(cls, cfg: Config) -> Sampling:
        """The sampling that trains."""
        rollout = cfg.rollout
        return cls(
            n=rollout.num_generations,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop or ()),
        )

    @classmethod
    def of_eval(cls, cfg: Config) -> Sampling:
        """The sampling that evaluates: only the stop strings are the rollout's."""
        return cls(
            n=cfg.eval.samples,
            max_new_tokens=cfg.eval.max_new_tokens,
            temperature=cfg.eval.temperature,
            top_p=cfg.eval.top_p,
            stop=tuple(cfg.rollout.stop or ()),
        )


def completion_seed(run_seed: int, group_id: str, index: int) -> int:
    """Seed of completion `index` of a group: the same whatever the rank, the batch or the number of processes."""
    return derive_seed(run_seed, "rollout", group_id, index)


def eos_token_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends a completion: the model's own list (it may hold several) and the tokenizer's."""
    listed = getattr(generation_config, "eos_token_id", None)
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    return frozenset(token for token in [*listed, tokenizer.eos_token_id] if token is not None)
