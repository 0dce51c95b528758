"""Rollout `hf`: generation with the trained module itself. No engine, no server, no `generate()`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from grpo_cli.rollout.decode import Decoded, Row, StopCheck, decode, layers_once, plan_batches, score
from grpo_cli.rollout.sampling import Sampling, completion_seed, eos_token_ids
from grpo_cli.rollout.sync import check_sync, relative_gap
from grpo_cli.schema import Config
from grpo_cli.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks

_MEMORY_SHARE = 0.2
"""Of the device's memory for caches and logits; of the total, not the free, so that batches repeat in a resumed run."""

_BYTES_PER_LOGIT = 32
"""float32 logits, their softmax and float64 running sum, and what sorting them for top_p takes."""


def make(cfg: Config, policy: Any, ranks: Ranks) -> HfRollout:
    return HfRollout(cfg, policy, ranks)


class HfRollout:
    """Generates with `policy.module` inside `policy.generation()`; every rank its own prompts, without collectives."""

    def __init__(self, cfg: Config, policy: Any, ranks: Ranks):
        self._policy = policy
        self._ranks = ranks
        self._seed = cfg.run.seed
        self._temperature = cfg.rollout.temperature
        self._tolerance = cfg.rollout.sync_tolerance
        self._training = Sampling.of_rollout(cfg)

    def generate(
        self, prompts: list[tuple[str, Prompt]], step: int, version: int, sampling: Sampling | None = None
    ) -> list[Group]:
        """See `Rollout.generate`."""
        sampling = sampling or self._training
        with self._policy.generation():
            decoded = self._decode_all(prompts, sampling)
        tokenizer, eos_ids = self._policy.tokenizer, self._eos_ids()
        groups = []
        for number, (group_id, prompt) in enumerate(prompts):
            rows = [decoded[Row(number, index)] for index in range(sampling.n)]
            completions = [_completion(row, tokenizer, eos_ids, sampling.stop) for row in rows]
            groups.append(Group(group_id, prompt, completions, step, version))
        return groups

    def sync(self, policy: Any, version: int) -> dict[str, float]:
        """Nothing to send: the module is the engine. The check proves that generation sees the trainer's weights.

        Where both have the very same tensors, one pass through the layers serves both sides: half the price.
        """
        start = time.perf_counter()
        held: dict[str, Tensor] = {}

        def engine(prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
            with self._policy.generation():
                return score(self._policy.module, prompt_ids, completion_ids, self._temperature)

        def hold() -> None:
            with self._policy.generation():
                held.update((name, weight.detach().cpu().clone()) for name, weight in _weights(self._policy.module))

        def weight_gap(name: str, tensor: Tensor) -> float | None:
            return relative_gap(tensor, held[name]) if name in held else None

        assert self._tolerance is not None, "rule sync_tolerance_positive refuses null"
        # Adapters are merged in what the trainer hands out and apart in the module: those weights do not compare.
        adapted = hasattr(self._policy.module, "get_base_model")
        gap_of = None if adapted else weight_gap
        with layers_once(self._policy.module):
            metrics = check_sync(policy, self._ranks, engine, gap_of, self._tolerance, before_reading=hold)
        return {**metrics, "time/weight_sync": time.perf_counter() - start}

    def metrics(self) -> dict[str, float]:
        """Nothing but what the loop measures itself."""
        return {}

    def close(self) -> None:
        """Nothing was started."""

    def _decode_all(self, prompts: list[tuple[str, Prompt]], sampling: Sampling) -> dict[Row, Decoded]:
        """Every completion by (prompt number, index), generated in as few batches as memory allows."""
        if not prompts:
            return {}
        module = self._policy.module
        stop_check = stop_string_check(self._policy.tokenizer, sampling.stop) if sampling.stop else None
        lengths = [len(prompt.token_ids) for _, prompt in prompts]
        decoded: dict[Row, Decoded] = {}
        for rows in plan_batches(lengths, sampling.n, sampling.max_new_tokens, token_budget(module)):
            # Each batch prefills only its own prompts, once.
            numbers = sorted({row.prompt for row in rows})
            local = [Row(numbers.index(row.prompt), row.index) for row in rows]
            token_ids = [prompts[number][1].token_ids for number in numbers]
            uniform_RT = None
            if not sampling.greedy:
                seeds = [completion_seed(self._seed, prompts[row.prompt][0], row.index) for row in rows]
                uniform_RT = uniforms(seeds, sampling.max_new_tokens)
            results = decode(module, token_ids, local, uniform_RT, sampling, self._eos_ids(), stop_check)
            decoded.update(zip(rows, results, strict=True))
        return decoded

    def _eos_ids(self) -> frozenset[int]:
        return eos_token_ids(getattr(self._policy.module, "generation_config", None), self._policy.tokenizer)


def uniforms(seeds: list[int], length: int) -> Tensor:
    """float64 [len(seeds), length] in [0, 1): row i depends on seeds[i] alone, token t of it on t alone."""
    rows = [torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows)


def token_budget(module: Any) -> int:
    """Cached tokens that one batch may hold: a fixed share of this process's memory over the bytes a token costs."""
    parameter = next(module.parameters())
    config = module.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # A row holds its logits once however long it is; charging them to every 64th token is close enough.
    logits = config.vocab_size * _BYTES_PER_LOGIT // 64
    bytes_per_token = 2 * config.num_hidden_layers * heads * head_dim * parameter.element_size() + logits
    if parameter.is_cuda:
        memory = torch.cuda.get_device_properties(parameter.device).total_memory
    else:
        memory = psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, int(memory * _MEMORY_SHARE) // bytes_per_token)


def stop_string_check(tokenizer: Any, stop: tuple[str, ...]) -> StopCheck:
    """A check that decodes only the tail in which a newly completed stop string must lie."""
    # A character takes four byte-level tokens at most; the rest is room for special tokens in between.
    window = 4 * max(len(text) for text in stop) + 8

    def check(tokens_BT: Tensor) -> Tensor:
        tails = tokenizer.batch_decode(tokens_BT[:, -window:].tolist(), skip_special_tokens=True)
        return torch.tensor([any(text in tail for text in stop) for tail in tails], dtype=torch.bool)

    return check


def _completion(row: Decoded, tokenizer: Any, eos_ids: frozenset[int], stop: tuple[str, ...]) -> Completion:
    """The text leaves out the EOS and what follows the first stop string, the stop string included; the ids do not."""
    ended_by_eos = row.stopped and row.token_ids[-1] in eos_ids
    text = tokenizer.decode(row.token_ids[:-1] if ended_by_eos else row.token_ids, skip_special_tokens=True)
    cuts = [text.index(found) for found in stop if found in text]
    return Completion(
        text=text[: min(cuts)] if cuts else text,
        token_ids=row.token_ids,
        finish_reason="stop" if row.stopped else "length",
        sampler_logprobs=row.logprobs,
    )


def _weights(module: Any) -> list[tuple[str, Tensor]]:
    """All weights of the module by HF name, a tied one under each of its names."""
    return list(module.named_parameters(remove_duplicate=False))
