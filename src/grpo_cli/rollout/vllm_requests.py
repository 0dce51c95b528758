"""What is asked of vLLM and what comes back: the same for an engine in this process and for a server."""

from __future__ import annotations

from typing import Any

import psutil

from grpo_cli.model.builtin import locate
from grpo_cli.rollout.sampling import Sampling
from grpo_cli.rollout.vllm_worker_extension import CLASS_PATH
from grpo_cli.schema import Config
from grpo_cli.types import Completion, FinishReason

_CPU_CACHE_SHARE = 0.25
"""Of the machine's memory for all KV caches of its engines."""

_CPU_BLOCK_TOKENS = 128


def sampling_params(sampling: Sampling, seed: int, eos_ids: frozenset[int]) -> dict[str, Any]:
    """`vllm.SamplingParams` of one completion: every one has its own seed, so that batches do not matter.

    `logprobs=0` is the logprob of the sampled token alone. Text is left to us (the ids are what is trained on), except
    that the engine needs it to find stop strings.
    """
    return {
        "n": 1,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k and sampling.top_k > 0 else 0,
        "min_p": sampling.min_p or 0.0,
        "seed": None if sampling.greedy else seed,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": sorted(eos_ids),
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": True,
    }


def scoring_requests(prompt_ids: list[int], completion_ids: list[int], temperature: float) -> list[dict[str, Any]]:
    """`{"token_ids", "sampling_params"}` requests whose answers hold the logprob of every completion token.

    At temperature 1 one pass over a prompt gives them all. At another one vLLM leaves the temperature out of a prompt's
    logprobs; then every token is a request: it is asked for by its id while any token is sampled, behind those before.
    """
    ids, first = prompt_ids + completion_ids, len(prompt_ids)
    if temperature == 1.0:
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        return [{"token_ids": ids, "sampling_params": params}]
    # The server shows as many logprobs as `logprobs` says, the sampled token's first: a second id makes room for ours.
    common = {"max_tokens": 1, "temperature": temperature, "seed": 0, "logprobs": 2, "detokenize": False}
    return [
        {"token_ids": ids[:at], "sampling_params": {**common, "logprob_token_ids": [ids[at], int(ids[at] == 0)]}}
        for at in range(first, len(ids))
    ]


def make_completion(
    tokenizer: Any,
    eos_ids: frozenset[int],
    stop: tuple[str, ...],
    token_ids: list[int],
    logprobs: list[float],
    finish_reason: str | None,
) -> Completion:
    """A completion as every backend makes it: text without EOS and without what follows a stop string; all ids."""
    assert len(token_ids) == len(logprobs), f"{len(token_ids)} tokens with {len(logprobs)} logprobs"
    assert finish_reason in ("stop", "length"), f"a completion that ended with {finish_reason!r}"
    ended: FinishReason = "stop" if finish_reason == "stop" else "length"
    by_eos = ended == "stop" and bool(token_ids) and token_ids[-1] in eos_ids
    text = tokenizer.decode(token_ids[:-1] if by_eos else token_ids, skip_special_tokens=True)
    cuts = [text.index(found) for found in stop if found in text]
    return Completion(text[: min(cuts)] if cuts else text, token_ids, ended, sampler_logprobs=logprobs)


def engine_options(cfg: Config, on_cpu: bool, engines_here: int) -> dict[str, Any]:
    """Engine arguments, by their Python names, of `vllm.LLM` and of the server alike.

    `engines_here`: engines that share this machine's memory.
    """
    model = str(locate(cfg.model.path))
    options: dict[str, Any] = {
        "model": model,
        "tokenizer": model,
        "revision": cfg.model.revision,
        "tokenizer_revision": cfg.model.revision,
        "trust_remote_code": cfg.model.trust_remote_code,
        "dtype": cfg.rollout_dtype,
        "max_model_len": cfg.rollout.max_model_len or -1,  # -1: the model's own, or what fits into the cache
        "seed": cfg.run.seed % 2**31,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the model's own sampling defaults must not act
        "worker_extension_cls": CLASS_PATH,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        options["enforce_eager"] = True  # compiling takes a minute and serves CPUs little
        # Between two pieces of a prompt vLLM 0.32 turns a request's own random generator back, which a CPU's cannot do:
        # "CPU Generator does not use offset" ends the engine. So prompts are not cut into pieces.
        options["enable_chunked_prefill"] = False
        options["kv_cache_memory_bytes"] = cpu_cache_bytes(cfg, model, engines_here)
    return {name: value for name, value in options.items() if value is not None}


def cpu_cache_bytes(cfg: Config, model: str, engines_here: int) -> int:
    """Bytes that hold a whole step's sequences, at most a fair share of a quarter of the memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        model, revision=cfg.model.revision, trust_remote_code=cfg.model.trust_remote_code
    ).get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item_bytes = 4 if cfg.rollout_dtype == "float32" else 2
    block_bytes = 2 * config.num_hidden_layers * heads * head_size * item_bytes * _CPU_BLOCK_TOKENS
    longest = cfg.data.max_prompt_tokens + max(cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)
    blocks = cfg.sequences_per_step * (longest // _CPU_BLOCK_TOKENS + 1)
    most = int(psutil.virtual_memory().total * _CPU_CACHE_SHARE) // engines_here
    return min(max(blocks * block_bytes, 2**26), most)
