"""Before the first step: do our shortcuts score as the model itself does?

The scorer puts its own arithmetic behind the decoder (head, temperature, log-softmax) and its own attention inside it
(packed rows). Both are right for the families of transformers that work as most do. A model that treats its logits in
another way, or ignores what it is told about packing, would train on wrong numbers in silence: so it is asked.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_cli.batch import pack
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.process.ranks import Ranks
from grpo_cli.schema import Config
from grpo_cli.types import Completion, Group, Prompt

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of a logprob, in nats. Rounding stays well below; a neighbour that is read, or a factor on the
logits that is not applied, changes some of a dozen tokens by more."""


@torch.no_grad()
def check_scoring(scorer: Any, cfg: Config, vocabulary: int, device: torch.device) -> None:
    """Compare `scorer` with the bare model on a few fixed tokens; raises ConfigError (`model_readable`) on a gap.

    Collective under ZeRO-3: every rank runs the same passes.
    """
    groups = _groups(min(vocabulary, 1000))
    gap = 0.0
    for micro in pack(groups, cfg, Ranks(0, 1, 0, device)).micro_batches:
        logprobs_T, _ = scorer(micro=micro)
        for index, sequence in enumerate(micro.sequences):
            group = groups[sequence.group]
            ids = group.prompt.token_ids + group.completions[sequence.completion].token_ids
            expected = scorer(plain_ids=torch.tensor([ids], device=device))[0][-sequence.length :]
            gap = max(gap, float((logprobs_T[micro.tokens.seq_T == index] - expected).abs().max()))
    if not gap <= TOLERANCE[cfg.model.dtype]:
        raise ConfigError(
            Finding(
                "model_readable",
                ("model.path", "model.attn_implementation", "trainer.packing"),
                f"model.path={cfg.model.path} scores tokens differently when it is run with trainer.packing="
                f"{cfg.trainer.packing} (by {gap:.3g} nats): its attention ignores the packing, or it treats its "
                "logits in a way that is not known here.",
                "trainer.packing=none, or model.attn_implementation=eager, or another model.path",
            )
        )


def _groups(vocabulary: int) -> list[Group]:
    """Two prompts of unlike length with two completions each, of ids that every vocabulary has."""
    groups = []
    for number, lengths in enumerate(((5, 3, 2), (2, 1, 4))):
        prompt, *completions = (
            [(7 * number + 11 * part + 3 * place) % vocabulary for place in range(length)]
            for part, length in enumerate(lengths, start=1)
        )
        answers = [Completion("", ids, "stop", unshaped=1.0, reward=1.0, advantage=0.0) for ids in completions]
        groups.append(Group(f"check-{number}", Prompt("check", "", prompt, None), answers, 0, 0))
    return groups
