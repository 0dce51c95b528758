"""Before the first step: do our shortcuts score as the model itself does?

The scorer puts its own arithmetic behind the decoder (head, temperature, log-softmax) and its own attention inside it
(packed rows). Both are right for the families of transformers that work as most do. A model that treats its logits in
another way, or ignores what it is told about packing, would train on wrong numbers in silence: so it is asked.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_cli.batch import Batch, pack
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.model.network import Scorer
from grpo_cli.process.ranks import Ranks
from grpo_cli.schema import Config
from grpo_cli.types import Completion, Group, Prompt

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of a logprob, in nats. Rounding stays well below; a neighbour that is read, or a factor on the
logits that is not applied, changes some of a dozen tokens by more."""

LONGEST_WINDOW = 256
"""Tokens of the longest sliding window that the check goes beyond: longer ones would make it slow."""


@torch.no_grad()
def check_scoring(engine: Any, scorer: Scorer, cfg: Config, device: torch.device) -> None:
    """Compare `scorer` with the bare model on a few fixed tokens; raises ConfigError (`model_readable`) on a gap.

    `engine` is the scorer as it is called: inside DeepSpeed's engine, or itself. Collective under ZeRO-3: every rank
    runs the same passes.
    """
    config = scorer.causal_lm.config.get_text_config()
    _check_reach(config, cfg)
    batch = _pack(_groups(min(scorer.vocabulary, 1000), _prompt_tokens(config, cfg)), cfg, device)
    gap = 0.0
    for micro in batch.micro_batches:
        logprobs_T, _ = engine(micro=micro)
        for index, sequence in enumerate(micro.sequences):
            group = batch.groups[sequence.group]
            ids = group.prompt.token_ids + group.completions[sequence.completion].token_ids
            expected = engine(plain_ids=torch.tensor([ids], device=device))[0][-sequence.length :]
            gap = max(gap, float((logprobs_T[micro.tokens.seq_T == index] - expected).abs().max()))
    if not gap <= TOLERANCE[cfg.model.dtype]:
        packed = cfg.trainer.packing != "none"
        raise ConfigError(
            Finding(
                "model_readable",
                ("model.path", "trainer.packing"),
                f"model.path={cfg.model.path} scores tokens differently when it is run with trainer.packing="
                f"{cfg.trainer.packing} (by {gap:.3g} nats): "
                + ("one of its layers (attention, convolution, recurrence) ignores the packing, or " if packed else "")
                + "it treats its logits in a way that is not known here.",
                "trainer.packing=none; if that is refused too, another model.path" if packed else "another model.path",
            )
        )


def _check_reach(config: Any, cfg: Config) -> None:
    """Refuse to pack where layers count their chunk (Llama 4) or window (GPT-Neo) from the row's start, not from the
    sequence's, and sequences can exceed it."""
    reaches = (getattr(config, name, None) for name in ("attention_chunk_size", "window_size"))
    reach, asked = next((n for n in reaches if isinstance(n, int)), None), _longest(cfg)
    if cfg.trainer.packing != "none" and reach is not None and asked > reach:
        raise ConfigError(
            Finding(
                "model_readable",
                ("model.path", "trainer.packing"),
                f"model.path={cfg.model.path} has layers that read {reach} tokens in a way that trainer.packing="
                f"{cfg.trainer.packing} cannot keep, and sequences have up to {asked}.",
                "trainer.packing=none",
            )
        )


def _longest(cfg: Config) -> int:
    """Tokens of the longest sequence that the run can train on."""
    return cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens


def _prompt_tokens(config: Any, cfg: Config) -> int:
    """Length of the first prompt: beyond the model's window if that is short and sequences of the run go beyond it."""
    window = getattr(config, "sliding_window", None)
    if cfg.trainer.packing == "none" or not window or window > LONGEST_WINDOW or _longest(cfg) <= window:
        return 5
    return max(5, min(2 * window, _longest(cfg) - 3))  # 3: its longest completion


def _pack(groups: list[Group], cfg: Config, device: torch.device) -> Batch:
    """All sequences in one micro-batch, so that there are neighbours to read whatever the sizes of the run are."""
    tokens = sum(len(group.prompt.token_ids + c.token_ids) for group in groups for c in group.completions)
    trainer = cfg.trainer.model_copy(update={"updates_per_step": 1, "micro_batch_tokens": tokens})
    return pack(groups, cfg.model_copy(update={"trainer": trainer}), Ranks(0, 1, 0, device))


def _groups(vocabulary: int, first_prompt: int) -> list[Group]:
    """Two prompts of unlike length with two completions each, of ids that every vocabulary has."""
    groups = []
    for number, lengths in enumerate(((first_prompt, 3, 2), (2, 1, 4))):
        prompt, *completions = (
            [(7 * number + 11 * part + 3 * place) % vocabulary for place in range(length)]
            for part, length in enumerate(lengths, start=1)
        )
        answers = [Completion("", ids, "stop", unshaped=1.0, reward=1.0, advantage=0.0) for ids in completions]
        groups.append(Group(f"check-{number}", Prompt("check", "", prompt, None), answers, 0, 0))
    return groups
