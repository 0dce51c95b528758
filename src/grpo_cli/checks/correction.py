"""Rules of the rollout correction and of off-policy rollouts."""

from __future__ import annotations

from grpo_cli.checks.engine import Found, View, broken, declare, error, ge, gt, lt, state, warning
from grpo_cli.checks.quantities import carries, colocated, corrects, rollout_dtype, sequence_loss

BOUNDS = ("loss.correction.low", "loss.correction.high")
TIGHT = {"loss.correction.low": 0.95, "loss.correction.high": 1.05}
GEOMETRIC = {"loss.correction.level": "geometric"} | TIGHT
OFF = {"loss.correction.mode": "none", "loss.correction.low": None, "loss.correction.high": None}


@warning("loss.correction.mode", "rollout.max_staleness", "rollout.name", "rollout.dtype", "model.dtype")
def correction_needs_an_engine_gap(c: View) -> Found:
    """Fresh rollouts of the trained module, or of an engine in float32 like the trainer, have the trainer's logprobs:
    all weights are 1 up to rounding."""
    agrees = c.rollout.name == "hf" or (rollout_dtype(c) == "float32" and c.model.dtype == "float32")
    if corrects(c) and c.rollout.max_staleness == 0 and not carries(c) and agrees:
        yield broken(
            f"{state(c, 'loss.correction.mode')} weighs a gap that is not there: "
            f"{state(c, 'rollout.name', 'rollout.max_staleness', 'model.dtype')}.",
            {key: value for key, value in OFF.items() if key == "loss.correction.mode" or _given(c, key)},
        )


@error(*BOUNDS, "loss.correction.mode")
def correction_low_below_high(c: View) -> Found:
    """The interval is empty: all tokens are masked, or clamped to one weight."""
    low, high = c.loss.correction.low, c.loss.correction.high
    if corrects(c) and ge(low, high):
        yield broken(
            f"loss.correction.low={low} is not below loss.correction.high={high}.",
            {"loss.correction.low": 0.5, "loss.correction.high": 5.0},
        )


@error(*BOUNDS, "loss.correction.mode")
def correction_bounds_around_one(c: View) -> Found:
    """On-policy tokens have weight 1; outside the bounds they would be masked or rescaled."""
    low, high = c.loss.correction.low, c.loss.correction.high
    if not corrects(c) or ge(low, high):
        return
    wrong: dict[str, float] = {}
    if lt(low, 0) or ge(low, 1):
        wrong["loss.correction.low"] = 0.5
    if lt(high, 1):
        wrong["loss.correction.high"] = 2.0
    if wrong:
        yield broken(
            f"{state(c, *wrong)}: the weight 1 of on-policy tokens must lie between, with low in [0, 1) and high >= 1.",
            wrong,
        )


@error("loss.correction.high", "loss.correction.mode")
def truncate_needs_high(c: View) -> Found:
    """Without an upper bound nothing is truncated: the weight of one token can be 1e4."""
    if c.loss.correction.mode == "truncate" and c.loss.correction.high is None:
        yield broken(
            "loss.correction.mode=truncate with loss.correction.high=null truncates nothing.",
            {"loss.correction.high": 2.0} | ({"loss.correction.low": None} if ge(c.loss.correction.low, 1) else {}),
        )


@error(*BOUNDS, "loss.correction.mode")
def mask_needs_a_bound(c: View) -> Found:
    """Without a bound nothing is masked."""
    if c.loss.correction.mode == "mask" and c.loss.correction.low is None and c.loss.correction.high is None:
        yield broken(
            "loss.correction.mode=mask with both bounds null masks nothing.",
            {"loss.correction.low": 0.5, "loss.correction.high": 5.0},
        )


@error("loss.correction.mode", *BOUNDS)
def correction_bounds_need_a_mode(c: View) -> Found:
    """The bounds look active, but without a mode nothing reads them."""
    given = [key for key in BOUNDS if _given(c, key)]
    if not corrects(c) and given:
        mode = "truncate" if c.loss.correction.high is not None else "mask"
        yield broken(
            f"{state(c, *given)} is not read by loss.correction.mode=none.",
            {"loss.correction.mode": mode},
            dict.fromkeys(given),
        )


@warning("loss.correction.level", "rollout.max_new_tokens", "loss.correction.mode")
def sequence_correction_needs_short_completions(c: View) -> Found:
    """level=sequence is a product over tokens: noise of 0.012 a token makes 3.3 after 100 tokens, so long completions
    are all cut."""
    if corrects(c) and c.loss.correction.level == "sequence" and gt(c.rollout.max_new_tokens, 512):
        yield broken(
            f"loss.correction.level=sequence multiplies up to {c.rollout.max_new_tokens} token weights: noise alone "
            "reaches the bounds.",
            GEOMETRIC,
            {"loss.correction.level": "token"},
        )


@warning(*BOUNDS, "loss.correction.level", "loss.correction.mode")
def geometric_correction_needs_tight_bounds(c: View) -> Found:
    """The mean over tokens stays near 1: a bound of a token weight's size never acts."""
    if corrects(c) and c.loss.correction.level == "geometric" and gt(c.loss.correction.high, 2):
        yield broken(
            f"{state(c, 'loss.correction.high')} never acts on a geometric mean, which stays near 1.",
            TIGHT,
            keys=("loss.correction.high", "loss.correction.low", "loss.correction.level", "loss.correction.mode"),
        )


@error("loss.correction.level", "loss.name", "loss.correction.mode")
def gmpo_needs_sequence_correction(c: View) -> Found:
    """GMPO has one value a sequence; a weight by token has no place in it."""
    if corrects(c) and c.loss.correction.level == "token" and c.loss.name == "gmpo":
        yield broken(
            "loss.correction.level=token has no place in loss.name=gmpo: one value a sequence.",
            GEOMETRIC,
            {"loss.correction.level": "sequence"},
        )


@warning("loss.correction.level", "loss.name", "loss.ratio_level", "loss.correction.mode")
def sequence_ratio_needs_sequence_correction(c: View) -> Found:
    """Token weights inside a sequence ratio undo its equal weighting."""
    if corrects(c) and c.loss.correction.level == "token" and sequence_loss(c):
        yield broken(
            f"loss.correction.level=token undoes the equal weighting of {state(c, 'loss.name', 'loss.ratio_level')}.",
            GEOMETRIC,
            {"loss.correction.level": "sequence"},
        )


@error("loss.correction.mode", "rollout.max_staleness")
def stale_rollouts_need_correction(c: View) -> Found:
    """The ratio starts at the updated policy, so without a correction staleness goes unweighed."""
    if gt(c.rollout.max_staleness, 0) and not corrects(c):
        yield broken(
            f"rollout.max_staleness={c.rollout.max_staleness} trains on older policies' rollouts, and "
            "loss.correction.mode=none weighs nothing.",
            {"loss.correction.mode": "truncate", "loss.correction.high": 2.0},
            {"rollout.max_staleness": 0},
        )


@error("rollout.max_staleness", "rollout.name")
def stale_rollouts_need_an_engine(c: View) -> Found:
    """hf generates with the module that is being trained: nothing can run ahead. rollout=vllm_server can."""
    if gt(c.rollout.max_staleness, 0) and c.rollout.name == "hf":
        yield broken(
            f"rollout.max_staleness={c.rollout.max_staleness}: rollout.name=hf generates with the trained module and "
            "cannot run ahead; rollout=vllm_server can.",
            {"rollout.max_staleness": 0},
        )


@error("rollout.devices", "rollout.max_staleness", "rollout.name")
def stale_rollouts_need_own_devices(c: View) -> Found:
    """Engine and trainer take turns on one device: no overlap, or a deadlock."""
    if gt(c.rollout.max_staleness, 0) and colocated(c):
        first, count = c.trainer.nproc_per_node, c.rollout.tensor_parallel_size or 1
        devices = list(range(first, first + count))
        own = {"rollout.devices": devices, "rollout.weight_sync": "nccl", "rollout.sleep_level": 0}
        yield broken(
            f"rollout.max_staleness={c.rollout.max_staleness} needs an engine that generates while the trainer trains, "
            "but rollout.devices=null lets them take turns.",
            own,
            {"rollout.max_staleness": 0},
        )


@error("filter.name", "rollout.max_staleness")
def stale_rollouts_exclude_dynamic_sampling(c: View) -> Found:
    """An asynchronous stream refills by itself: rounds and surplus have no meaning there."""
    if gt(c.rollout.max_staleness, 0) and c.filter.name == "dynamic_sampling":
        yield broken(
            f"filter.name=dynamic_sampling has no rounds in the stream of rollout.max_staleness="
            f"{c.rollout.max_staleness}, which refills by itself.",
            {"filter.name": "zero_std", "filter.max_rounds": None},
            {"rollout.max_staleness": 0},
        )


@warning("rollout.max_staleness")
def staleness_stays_small(c: View) -> Found:
    """The weights of such old rollouts are mostly cut: data without signal."""
    if gt(c.rollout.max_staleness, 8):
        yield broken(f"{state(c, 'rollout.max_staleness')} is more than 8 steps.", {"rollout.max_staleness": 8})


def _given(c: View, key: str) -> bool:
    return getattr(c.loss.correction, key.rpartition(".")[2]) is not None


declare(
    "correction_needs_sampler_logprobs", "error", "correction", "start",
    "loss.correction.mode", "loss.seq_logprob_error_threshold", "rollout.server_url",
    why="""loss.correction or loss.seq_logprob_error_threshold compares with the sampler's logprobs, but the server (in
    grpo replay: the dump) returns none. There is no denominator: a late crash, or zero-filled weights of 1e4. Start
    the server with logprobs, or set loss.correction.mode=none without bounds.""",
)  # fmt: skip
declare(
    "server_returns_processed_logprobs", "error", "correction", "start", "rollout.server_url", "rollout.temperature",
    why="""The server returns raw logprobs while rollout.temperature is not 1 and loss.correction or
    loss.seq_logprob_error_threshold compares with them. Raw logprobs ignore the temperature: every weight is biased.
    Start the server with --logprobs-mode processed_logprobs.""",
)  # fmt: skip
