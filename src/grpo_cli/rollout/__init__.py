"""Rollout backends: where completions come from. One module a backend; importing this package imports none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from grpo_cli.rollout.sampling import Sampling
from grpo_cli.schema import Config
from grpo_cli.types import Group, Prompt

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks


class Rollout(Protocol):
    """What the loop asks of a backend. Every rank calls each method, in the same order."""

    def generate(
        self, prompts: list[tuple[str, Prompt]], step: int, version: int, sampling: Sampling | None = None
    ) -> list[Group]:
        """Sample a group for each (group id, prompt) of this rank, in the order given.

        `version`: number of weight syncs that the policy has seen. `sampling`: None is the config's `rollout`.
        Token ids are those that were sampled, never text tokenised again; the last one is the EOS where the
        completion ended by one. `sampler_logprobs` is always set: after temperature, and renormalised over the
        tokens that top_p, top_k and min_p leave.
        """

    def sync(self, policy: Any, version: int) -> dict[str, float]:
        """Give the engine the policy's weights, reset its caches and prove that it took (`sync.check_sync`).

        Returns `sync/logprob_gap_max`, `time/weight_sync` and `time/sync_check` (seconds); raises GuardStop on a gap.
        """

    def metrics(self) -> dict[str, float]:
        """What this rank's engine measured since the last call (`rollout/*`); not a collective."""

    def close(self) -> None:
        """End what the backend started; may be called twice."""


def make_rollout(cfg: Config, policy: Any, ranks: Ranks) -> Rollout:
    """The backend of `cfg.rollout.name`: every backend module has a function `make(cfg, policy, ranks)`."""
    return importlib.import_module(f"grpo_cli.rollout.{cfg.rollout.name}").make(cfg, policy, ranks)
