"""Rules of the rollout: sampling, lengths, and the module or engine that generates."""

from __future__ import annotations

from grpo_cli.checks.engine import Found, View, broken, declare, error, ge, gt, le, lt, state, warning
from grpo_cli.checks.quantities import completion_limits, corrects, cut_sampling, processes, rollout_dtype

SAMPLING = ("rollout.top_p", "rollout.top_k", "rollout.min_p")
RANGES = "rollout.top_p in (0, 1] (off: 1.0), rollout.top_k >= -1 (off: -1), rollout.min_p in [0, 1) (off: 0)"


@error("rollout.temperature", "eval.temperature")
def temperature_positive(c: View) -> Found:
    """Logits are divided by the temperature. Below 0.01 vLLM lifts it, so engine and trainer would disagree; 0 is a
    division by zero. Greedy decoding belongs to evaluation: eval.temperature=0 is allowed."""
    if lt(c.rollout.temperature, 0.01):
        yield broken(
            f"rollout.temperature={c.rollout.temperature} is below 0.01; greedy decoding belongs to grpo eval.",
            {"rollout.temperature": 1.0},
            keys=("rollout.temperature",),
        )
    if lt(c.eval.temperature, 0.01) and c.eval.temperature != 0:
        yield broken(
            f"eval.temperature={c.eval.temperature} is below 0.01 and not 0 (greedy).",
            {"eval.temperature": 0.0},
            keys=("eval.temperature",),
        )


@warning("rollout.temperature")
def temperature_explores(c: View) -> Found:
    """At a low temperature the completions of a group become equal, so nearly every group has no signal and is
    dropped. Usual values lie between 0.6 and 1.2."""
    if ge(c.rollout.temperature, 0.01) and lt(c.rollout.temperature, 0.3):
        yield broken(
            f"rollout.temperature={c.rollout.temperature} is below 0.3: the completions of a group become equal.",
            {"rollout.temperature": 1.0},
        )


@error(*SAMPLING, "eval.top_p")
def sampling_filters_in_range(c: View) -> Found:
    """top_p is a share in (0, 1], min_p one in [0, 1), top_k a count of at least -1. The engine would refuse the first
    request, after loading its weights."""
    rollout = c.rollout
    off: dict[str, float] = {}
    if le(rollout.top_p, 0) or gt(rollout.top_p, 1):
        off["rollout.top_p"] = 1.0
    if lt(rollout.min_p, 0) or ge(rollout.min_p, 1):
        off["rollout.min_p"] = 0.0
    if lt(rollout.top_k, -1):
        off["rollout.top_k"] = -1
    if le(c.eval.top_p, 0) or gt(c.eval.top_p, 1):
        off["eval.top_p"] = 1.0
    if off:
        yield broken(f"{state(c, *off)} is out of range: {RANGES}.", off, keys=tuple(off))


@warning(*SAMPLING, "loss.correction.mode", "loss.seq_logprob_error_threshold")
def training_samples_full_support(c: View) -> Found:
    """top_p, top_k or min_p cut the distribution that tokens are drawn from, while logprobs and gradient are those of
    the full policy: a bias that nothing corrects."""
    cut = cut_sampling(c)
    if cut and not corrects(c) and c.loss.seq_logprob_error_threshold is None:
        yield broken(f"{state(c, *cut)} cuts the distribution that is sampled; the gradient is the full policy's.", cut)


@error(*SAMPLING, "loss.correction.mode", "loss.seq_logprob_error_threshold")
def corrected_sampling_needs_full_support(c: View) -> Found:
    """With top_p, top_k or min_p the sampler's logprobs are renormalised over the kept tokens, the trainer's are not.
    A correction or an error threshold that compares the two would take that mass for a gap: every weight is biased."""
    cut = cut_sampling(c)
    if cut and (corrects(c) or c.loss.seq_logprob_error_threshold is not None):
        reader = "loss.correction.mode" if corrects(c) else "loss.seq_logprob_error_threshold"
        yield broken(
            f"{state(c, *cut)} renormalises the sampler's logprobs, which {state(c, reader)} compares with the "
            "trainer's: every weight is biased by the mass that was cut.",
            cut,
        )


@error(
    "rollout.max_model_len",
    "data.max_prompt_tokens",
    "rollout.max_new_tokens",
    "eval.max_new_tokens",
    "trainer.eval_every",
)
def sequence_fits_context(c: View) -> Found:
    """The longest prompt and completion together are longer than the engine's context. Long prompts would crash the
    engine or silently shorten completions, while other processes hang. grpo eval, and a run with trainer.eval_every,
    sample completions of eval.max_new_tokens too."""
    if c.rollout.max_model_len is None:
        return
    limits = completion_limits(c, c.command)
    key = max(limits, key=lambda name: limits[name])
    longest, room = c.data.max_prompt_tokens + limits[key], c.rollout.max_model_len - c.data.max_prompt_tokens
    if longest > c.rollout.max_model_len:
        shorter = [{key: room}] if key == "eval.max_new_tokens" and c.rollout.max_new_tokens <= room else []
        yield broken(
            f"rollout.max_model_len={c.rollout.max_model_len} is less than the {longest} tokens of the longest "
            f"sequence (data.max_prompt_tokens={c.data.max_prompt_tokens} + {key}={limits[key]}).",
            {"rollout.max_model_len": longest},
            *shorter,
            keys=("rollout.max_model_len", "data.max_prompt_tokens", key),
        )


@error("rollout.stop")
def stop_strings_not_empty(c: View) -> Found:
    """An empty stop string matches at once: every completion is empty, or the engine refuses the request."""
    stop = c.rollout.stop
    if stop is not None and "" in stop:
        rest = [text for text in stop if text]
        yield broken(f"{state(c, 'rollout.stop')} holds an empty string.", {"rollout.stop": rest or None})


@warning("rollout.max_new_tokens", "loss.mask_truncated")
def mask_truncated_needs_room(c: View) -> Found:
    """loss.mask_truncated leaves completions that hit the limit out of the loss. With so short a limit nearly every
    completion hits it: few tokens train."""
    if c.loss.mask_truncated and lt(c.rollout.max_new_tokens, 64):
        yield broken(
            f"loss.mask_truncated=true masks every completion that reaches rollout.max_new_tokens="
            f"{c.rollout.max_new_tokens}: nearly all.",
            {"rollout.max_new_tokens": 64},
            {"loss.mask_truncated": False},
        )


@error("rollout.dtype", "model.dtype", "rollout.name")
def hf_rollout_shares_model_dtype(c: View) -> Found:
    """The hf rollout generates with the trained module itself; another type cannot be honoured."""
    if c.rollout.name == "hf" and rollout_dtype(c) != c.model.dtype:
        yield broken(
            f"rollout.name=hf generates with the trained module, so rollout.dtype={c.rollout.dtype} cannot differ from "
            f"model.dtype={c.model.dtype}.",
            {"rollout.dtype": c.model.dtype},
        )


@warning("rollout.dtype", "model.dtype", "loss.correction.mode")
def engine_dtype_matches_model(c: View) -> Found:
    """The engine computes in another type than the trainer. That constant gap enters every gradient, uncorrected."""
    if c.rollout.name != "hf" and rollout_dtype(c) != c.model.dtype and not corrects(c):
        yield broken(
            f"rollout.dtype={c.rollout.dtype} differs from model.dtype={c.model.dtype}, and loss.correction.mode=none "
            "weighs no gap.",
            {"rollout.dtype": c.model.dtype},
            {"loss.correction.mode": "truncate", "loss.correction.high": 2.0},
        )


@warning("trainer.zero_stage", "rollout.name", "trainer.nproc_per_node", "trainer.nnodes")
def hf_rollout_avoids_zero3(c: View) -> Found:
    """Under ZeRO 3 the hf rollout gathers every shard to generate, and processes that finish early keep waiting.
    Stage 2, or rollout=vllm, has no such wait."""
    if c.rollout.name == "hf" and c.trainer.zero_stage == 3 and processes(c) > 1:
        yield broken(
            f"rollout.name=hf gathers all shards of trainer.zero_stage=3 from {processes(c)} processes to generate; "
            "rollout=vllm would not.",
            {"trainer.zero_stage": 2},
        )


declare(
    "context_fits_model", "error", "rollout", "start", "rollout.max_model_len", "rollout.max_new_tokens",
    "eval.max_new_tokens", "model.path",
    why="""rollout.max_model_len (null: data.max_prompt_tokens + rollout.max_new_tokens, or eval.max_new_tokens where
    there is evaluation) is more than the positions of the model. Positions past the trained range give noise or an
    index error. Lower rollout.max_model_len, rollout.max_new_tokens and eval.max_new_tokens.""",
)  # fmt: skip
