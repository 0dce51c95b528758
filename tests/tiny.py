"""Tiny models, configs and groups for tests that need a policy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from grpo_cli.compose import compose
from grpo_cli.schema import Config, parse
from grpo_cli.types import Completion, Group, Prompt

VOCABULARY = 96

WINDOW = 16
"""Sliding window, in tokens, of the families that have one; of Qwen2's and Gemma 2's two layers one slides."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": WINDOW},
    # No cap on attention scores: eager applies one, sdpa cannot.
    "gemma2": {"sliding_window": WINDOW, "head_dim": 16, "attn_logit_softcapping": None},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "bos_token_id": 1, "eos_token_id": 0},
}


def tiny_model(directory: Path, family: str = "llama", seed: int = 0) -> Path:
    """A random model of width 64 in `directory`, with a tokenizer of `VOCABULARY` made-up words."""
    torch.manual_seed(seed)
    if family == "gpt2":
        # Dropout of 0.1 everywhere: scoring must switch it off.
        config = AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=128)
    else:
        config = AutoConfig.for_model(
            family.removesuffix("-tied"),
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            attention_dropout=0.1,
            **FAMILIES[family],
        )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0").save_pretrained(directory)
    return directory


def config(*overrides: str) -> Config:
    """A resolved config of the shipped groups: float32, small micro-batches, one update a step."""
    base = [
        "run.dir=unused",
        "model=hf",
        "model.dtype=float32",
        "model.gradient_checkpointing=false",
        "data=arithmetic",
        "rollout.max_new_tokens=16",
        "trainer.steps=10",
        "trainer.lr=1e-2",
        "trainer.zero_stage=0",
        "trainer.max_grad_norm=null",
    ]
    composed = compose([*base, *overrides])
    assert not composed.findings, composed.findings
    assert composed.config is not None
    return parse(composed.config)


def make_groups(count: int = 3, generations: int = 4, seed: int = 0, sampler: bool = True) -> list[Group]:
    """Groups with uneven prompts and completions (1 to 16 tokens) and centred advantages."""
    draw = random.Random(seed)
    groups = []
    for g in range(count):
        prompt = Prompt(f"row-{g}", "", [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, 20))], "1")
        completions = []
        for i in range(generations):
            length = draw.randint(1, 16)
            completion = Completion("", [draw.randrange(VOCABULARY) for _ in range(length)], "stop")
            completion.reward = completion.unshaped = float(i % 2)
            completion.advantage = (1.0 if i % 2 else -1.0) * (1 + g / 4)
            if sampler:
                completion.sampler_logprobs = [-draw.random() - 3 for _ in range(length)]
            completions.append(completion)
        groups.append(Group(f"1-{g}", prompt, completions, 1, 0))
    return groups
