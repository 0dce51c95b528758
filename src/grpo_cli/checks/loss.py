"""Rules of the loss: on-policy ratio, clip range, ratio level and aggregation."""

from __future__ import annotations

from grpo_cli.checks.engine import Found, View, broken, error, ge, gt, le, lt, state, warning
from grpo_cli.checks.quantities import CLIPPED, processes, recommended_clip, sequence_loss, sequences, several, to_loss

RATIO_LOSSES = ("gspo", "cispo", "gmpo", "sapo")
CLIP = ("loss.clip_low", "loss.clip_high")


@error("loss.force_on_policy_ratio", "trainer.updates_per_step", "trainer.epochs_per_step")
def force_on_policy_needs_one_update(c: View) -> Found:
    """loss.force_on_policy_ratio declares the ratio 1. From the second update of a step the policy has moved, but the
    ratio would stay 1."""
    if c.loss.force_on_policy_ratio and several(c):
        one = {key: 1 for key in ("updates_per_step", "epochs_per_step") if getattr(c.trainer, key) > 1}
        yield broken(
            f"loss.force_on_policy_ratio=true declares the ratio 1, but {state(c, 'trainer.updates_per_step')} x "
            f"{state(c, 'trainer.epochs_per_step')} update the policy in between.",
            {f"trainer.{key}": value for key, value in one.items()},
            {"loss.force_on_policy_ratio": False},
        )


@error("loss.force_on_policy_ratio", "rollout.max_staleness")
def force_on_policy_needs_fresh_rollouts(c: View) -> Found:
    """Stale rollouts are off-policy; declaring the ratio 1 hides it."""
    if c.loss.force_on_policy_ratio and gt(c.rollout.max_staleness, 0):
        yield broken(
            f"loss.force_on_policy_ratio=true declares rollouts on-policy that are up to "
            f"rollout.max_staleness={c.rollout.max_staleness} steps old.",
            {"rollout.max_staleness": 0},
            {"loss.force_on_policy_ratio": False},
        )


@error("loss.force_on_policy_ratio", "loss.name", "loss.ratio_level")
def force_on_policy_excludes_ratio_losses(c: View) -> Found:
    """gspo, cispo, gmpo, sapo and the sequence ratio are about the ratio. With a ratio of 1 they lose it: not the
    named method."""
    loss = c.loss
    if loss.force_on_policy_ratio and (loss.name in RATIO_LOSSES or loss.ratio_level == "sequence"):
        yield broken(
            f"loss.force_on_policy_ratio=true sets to 1 the ratio that {state(c, 'loss.name', 'loss.ratio_level')} is "
            "about.",
            {"loss.force_on_policy_ratio": False},
            to_loss(c, "ppo_clip"),
        )


@error("loss.dual_clip", "loss.force_on_policy_ratio")
def force_on_policy_excludes_dual_clip(c: View) -> Found:
    """A ratio of 1 never reaches the second clip; nothing reads it."""
    if c.loss.force_on_policy_ratio and c.loss.dual_clip is not None:
        yield broken(
            f"{state(c, 'loss.dual_clip')} is never reached by the ratio 1 of loss.force_on_policy_ratio=true.",
            {"loss.dual_clip": None},
        )


@warning(*CLIP, "loss.force_on_policy_ratio", "loss.name")
def force_on_policy_ignores_clip(c: View) -> Found:
    """The ratio is 1, so the clip range never acts. Only a warning, although nothing reads the values: group files
    carry a clip range."""
    given = _given(c, *CLIP)
    if c.loss.force_on_policy_ratio and c.loss.name in CLIPPED and given:
        yield broken(
            f"{state(c, *given)} never acts on the ratio 1 of loss.force_on_policy_ratio=true.", dict.fromkeys(given)
        )


@error(*CLIP, "loss.name", "loss.force_on_policy_ratio")
def clip_range_needs_both_bounds(c: View) -> Found:
    """The clipped losses clip on both sides. With one bound missing that side is unbounded, or silently copies the
    other."""
    loss = c.loss
    missing = {key: bound for key, bound in zip(CLIP, recommended_clip(c), strict=True) if _null(c, key)}
    if loss.name in (*CLIPPED, "gspo", "gmpo") and not loss.force_on_policy_ratio and missing:
        yield broken(f"loss.name={loss.name} clips on both sides, but {state(c, *missing)}.", missing, keys=CLIP)


@error(*CLIP)
def clip_not_negative(c: View) -> Found:
    """With a negative bound the range excludes 1: on-policy tokens are clipped and train nothing."""
    low, high = recommended_clip(c)
    negative: dict[str, float | None] = {}
    if lt(c.loss.clip_low, 0):
        negative["loss.clip_low"] = low
    if lt(c.loss.clip_high, 0):
        negative["loss.clip_high"] = high
    if negative:
        yield broken(f"{state(c, *negative)} excludes the ratio 1 from the range.", negative, keys=tuple(negative))


@error("loss.clip_low", "loss.name")
def clip_low_below_one(c: View) -> Found:
    """The lower bound of the ratio is 1 - clip_low. From clip_low 1 on it is 0 or less and never acts. (gmpo clamps
    the logarithm, where 1 and more are ranges.)"""
    if c.loss.name != "gmpo" and ge(c.loss.clip_low, 1):
        yield broken(
            f"{state(c, 'loss.clip_low')} makes the lower bound {1 - c.loss.clip_low:g}, which no ratio reaches.",
            {"loss.clip_low": recommended_clip(c)[0]},
        )


@warning(*CLIP, "loss.name", "loss.ratio_level", "loss.force_on_policy_ratio")
def token_clip_not_sequence_sized(c: View) -> Found:
    """Token ratios move by tenths, sequence ratios by thousandths. A range of GSPO's size on token ratios clips almost
    every token."""
    loss = c.loss
    small = ge(loss.clip_high, 0) and lt(loss.clip_high, 0.01)
    if loss.name in (*CLIPPED, "cispo") and loss.ratio_level == "token" and not loss.force_on_policy_ratio and small:
        low, high = recommended_clip(c)
        yield broken(
            f"{state(c, 'loss.clip_high')} is the size of a sequence ratio; loss.name={loss.name} clips by token, "
            "almost every one.",
            {"loss.clip_low": low, "loss.clip_high": high},
            to_loss(c, "gspo"),
            keys=("loss.clip_high", "loss.clip_low", "loss.name", "loss.ratio_level"),
        )


@error("loss.dual_clip")
def dual_clip_above_one(c: View) -> Found:
    """Tokens of negative advantage hit a dual clip of 1 or less at the ratio 1 already and train nothing."""
    if le(c.loss.dual_clip, 1):
        yield broken(f"{state(c, 'loss.dual_clip')} is not above 1.", {"loss.dual_clip": 3.0}, {"loss.dual_clip": None})


@warning("loss.dual_clip", "loss.clip_high")
def dual_clip_above_clip_high(c: View) -> Found:
    """The emergency bound lies inside the ordinary range and cuts normal tokens."""
    dual, high = c.loss.dual_clip, c.loss.clip_high
    if gt(dual, 1) and high is not None and dual <= 1 + high:
        yield broken(
            f"loss.dual_clip={dual} is not above 1 + loss.clip_high={1 + high:g}.",
            {"loss.dual_clip": 3.0},
            {"loss.dual_clip": None},
        )


@error("loss.dual_clip", "loss.name")
def dual_clip_needs_ppo_clip(c: View) -> Found:
    """Only PPO's clipped surrogate has a second clip; another loss does not read it."""
    if c.loss.dual_clip is not None and c.loss.name not in (*CLIPPED, "gspo"):
        yield broken(
            f"{state(c, 'loss.dual_clip')} is not read by loss.name={c.loss.name}.",
            {"loss.dual_clip": None},
            to_loss(c, "ppo_clip"),
        )


@error(*CLIP, "loss.name")
def clip_needs_a_clipped_loss(c: View) -> Found:
    """sapo and reinforce do not clip; nothing reads the range."""
    given = _given(c, *CLIP)
    if c.loss.name in ("sapo", "reinforce") and given:
        yield broken(f"{state(c, *given)} is not read by loss.name={c.loss.name}.", dict.fromkeys(given))


@error("loss.tau_pos", "loss.tau_neg", "loss.name")
def sapo_taus_positive(c: View) -> Found:
    """sapo's gate divides by its temperatures. Null or 0 is a division by zero, and a negative one turns the gate
    round: it would reward what is wrong."""
    wrong = {
        f"loss.{key}": value
        for key, value in (("tau_pos", 1.0), ("tau_neg", 1.05))
        if getattr(c.loss, key) is None or getattr(c.loss, key) <= 0
    }
    if c.loss.name == "sapo" and wrong:
        yield broken(f"loss.name=sapo needs positive temperatures, but {state(c, *wrong)}.", wrong)


@error("loss.tau_pos", "loss.tau_neg", "loss.name")
def taus_need_sapo(c: View) -> Found:
    """Only sapo has a gate; nothing else reads its temperatures."""
    given = _given(c, "loss.tau_pos", "loss.tau_neg")
    if c.loss.name != "sapo" and given:
        yield broken(
            f"{state(c, *given)} is not read by loss.name={c.loss.name}.", dict.fromkeys(given), to_loss(c, "sapo")
        )


@error("loss.ratio_level", "loss.name")
def gspo_needs_sequence_ratio(c: View) -> Found:
    """Without the sequence ratio it is ppo_clip called gspo."""
    if c.loss.name == "gspo" and c.loss.ratio_level != "sequence":
        yield broken(
            f"loss.ratio_level={c.loss.ratio_level} makes loss.name=gspo a ppo_clip.",
            {"loss.ratio_level": "sequence"},
            to_loss(c, "ppo_clip"),
        )


@error("loss.ratio_level", "loss.name")
def sequence_ratio_needs_ppo_clip(c: View) -> Found:
    """cispo, sapo and reinforce define token weights only; the level would be ignored."""
    if c.loss.ratio_level == "sequence" and c.loss.name in ("cispo", "sapo", "reinforce"):
        yield broken(
            f"loss.ratio_level=sequence is not read by loss.name={c.loss.name}, which weighs by token.",
            {"loss.ratio_level": "token"},
            to_loss(c, "gspo"),
        )


@error("loss.aggregation", "loss.name", "loss.ratio_level")
def sequence_ratio_needs_sequence_aggregation(c: View) -> Found:
    """One ratio a sequence removes the weight of length. token_mean and constant count long sequences by length
    again."""
    loss = c.loss
    if sequence_loss(c) and loss.aggregation in ("token_mean", "constant"):
        mended = {"loss.aggregation": "seq_mean_token_mean"}
        level = {"loss.ratio_level": "token"}
        yield broken(
            f"loss.aggregation={loss.aggregation} counts long sequences by length again, which the sequence ratio of "
            f"loss.name={loss.name} removes.",
            *((level, mended) if loss.name in ("dapo", "dr_grpo") else (mended, level)),
        )


@warning(*CLIP, "loss.name", "loss.ratio_level", "loss.force_on_policy_ratio")
def sequence_ratio_needs_narrow_clip(c: View) -> Found:
    """Sequence ratios move by 1e-4 to 1e-3. With a range of a token ratio's size the clip never acts."""
    wide = ge(c.loss.clip_low, 0.01) or ge(c.loss.clip_high, 0.01)
    if sequence_loss(c) and not c.loss.force_on_policy_ratio and wide:
        yield broken(
            f"{state(c, *CLIP)} never acts on sequence ratios, which move by 1e-4 to 1e-3.",
            {"loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
        )


@error("loss.clip_high", "loss.name")
def cispo_needs_clip_high(c: View) -> Found:
    """cispo's weight has no other cap: one off-policy token could dominate the update."""
    if c.loss.name == "cispo" and c.loss.clip_high is None:
        yield broken("loss.clip_high=null leaves the weight of loss.name=cispo without a cap.", {"loss.clip_high": 4.0})


@warning("loss.clip_low", "loss.name")
def cispo_needs_no_lower_bound(c: View) -> Found:
    """A floor lifts the weight of tokens that the policy has abandoned."""
    if c.loss.name == "cispo" and c.loss.clip_low is not None:
        yield broken(
            f"{state(c, 'loss.clip_low')} lifts the weight of tokens that the policy has abandoned.",
            {"loss.clip_low": None},
        )


@error("loss.aggregation", "loss.name")
def gmpo_needs_sequence_mean(c: View) -> Found:
    """GMPO gives one value a sequence; another aggregation would be ignored."""
    if c.loss.name == "gmpo" and c.loss.aggregation != "seq_mean_token_mean":
        yield broken(
            f"loss.aggregation={c.loss.aggregation} has no place in loss.name=gmpo: one value a sequence.",
            {"loss.aggregation": "seq_mean_token_mean"},
        )


@error("loss.constant_length", "loss.aggregation")
def constant_aggregation_needs_length(c: View) -> Found:
    """aggregation=constant divides by loss.constant_length; without it the first loss crashes."""
    length = c.loss.constant_length
    if c.loss.aggregation == "constant" and (length is None or length <= 0):
        yield broken(
            f"{state(c, 'loss.constant_length')} gives loss.aggregation=constant nothing to divide by.",
            {"loss.constant_length": c.rollout.max_new_tokens},
        )


@error("loss.constant_length", "loss.aggregation")
def constant_length_needs_constant_aggregation(c: View) -> Found:
    """Nothing else reads the length; the loss would still be a mean."""
    if c.loss.aggregation != "constant" and c.loss.constant_length is not None:
        yield broken(
            f"{state(c, 'loss.constant_length')} is not read by loss.aggregation={c.loss.aggregation}.",
            {"loss.constant_length": None},
            {"loss.aggregation": "constant"},
        )


@warning("loss.constant_length", "rollout.max_new_tokens", "loss.aggregation")
def constant_length_near_max_new_tokens(c: View) -> Found:
    """A constant far from the completion length scales every gradient by that factor: a hidden learning rate."""
    length, longest = c.loss.constant_length, c.rollout.max_new_tokens
    if c.loss.aggregation == "constant" and gt(length, 0) and (length > 4 * longest or 4 * length < longest):
        yield broken(
            f"loss.constant_length={length} is {length / longest:.4g} times rollout.max_new_tokens={longest}: every "
            "gradient is scaled by the inverse.",
            {"loss.constant_length": longest},
        )


@error("loss.aggregation", "loss.name")
def dr_grpo_loss_needs_constant_aggregation(c: View) -> Found:
    """With a mean over the length it is ppo_clip called dr_grpo."""
    if c.loss.name == "dr_grpo" and c.loss.aggregation != "constant":
        yield broken(
            f"loss.aggregation={c.loss.aggregation} makes loss.name=dr_grpo a ppo_clip.",
            {"loss.aggregation": "constant"},
            to_loss(c, "ppo_clip"),
        )


@error("loss.aggregation", "loss.name")
def dapo_needs_token_mean(c: View) -> Found:
    """DAPO is the token mean; with another aggregation it is ppo_clip called dapo."""
    if c.loss.name == "dapo" and c.loss.aggregation != "token_mean":
        yield broken(
            f"loss.aggregation={c.loss.aggregation} makes loss.name=dapo a ppo_clip.",
            {"loss.aggregation": "token_mean"},
            to_loss(c, "ppo_clip"),
        )


@error("loss.clip_high", "loss.clip_low", "loss.name", "loss.force_on_policy_ratio")
def dapo_needs_clip_higher(c: View) -> Found:
    """DAPO is clip-higher; with a symmetric or inverted range it is ppo_clip called dapo."""
    low, high = c.loss.clip_low, c.loss.clip_high
    if c.loss.name == "dapo" and not c.loss.force_on_policy_ratio and le(high, low):
        higher = {"loss.clip_high": 0.28} if low < 0.28 else {"loss.clip_high": 0.28, "loss.clip_low": 0.2}
        yield broken(
            f"loss.clip_high={high} is not above loss.clip_low={low}: loss.name=dapo is clip-higher.",
            higher,
            to_loss(c, "ppo_clip"),
        )


@warning("trainer.updates_per_step", "trainer.epochs_per_step", "loss.name", "rollout.max_staleness")
def ratio_loss_needs_several_updates(c: View) -> Found:
    """With one update a step on fresh rollouts the ratio is always 1: gspo, cispo, gmpo and sapo all reduce to
    REINFORCE."""
    loss = c.loss
    if loss.name in RATIO_LOSSES and not several(c) and c.rollout.max_staleness == 0 and not loss.force_on_policy_ratio:
        # Unequal halves, or too small ones for the processes, are the next warning, whose fix is one update again.
        halves = sequences(c) % 2 == 0 and sequences(c) >= 2 * processes(c)
        yield broken(
            f"trainer.updates_per_step=1 and trainer.epochs_per_step=1 leave the ratio of loss.name={loss.name} at 1: "
            "this is REINFORCE.",
            {"trainer.updates_per_step" if halves else "trainer.epochs_per_step": 2},
            to_loss(c, "reinforce"),
        )


@warning("trainer.updates_per_step", "trainer.epochs_per_step", "loss.name")
def reinforce_needs_one_update(c: View) -> Found:
    """reinforce has no ratio: later updates of a step train on the samples of another policy."""
    if c.loss.name == "reinforce" and several(c):
        yield broken(
            f"loss.name=reinforce has no ratio for the later ones of {state(c, 'trainer.updates_per_step')} x "
            f"{state(c, 'trainer.epochs_per_step')} updates.",
            {"trainer.updates_per_step": 1, "trainer.epochs_per_step": 1},
            to_loss(c, "ppo_clip"),
        )


@error("loss.top_entropy_quantile")
def entropy_quantile_in_unit_interval(c: View) -> Found:
    """The quantile is the share of tokens that keep the policy term: a value in (0, 1], 1.0 is off."""
    if le(c.loss.top_entropy_quantile, 0) or gt(c.loss.top_entropy_quantile, 1):
        yield broken(
            f"{state(c, 'loss.top_entropy_quantile')} is not in (0, 1].",
            {"loss.top_entropy_quantile": 1.0},
        )


@error("loss.top_entropy_quantile", "loss.name", "loss.ratio_level")
def entropy_quantile_needs_token_ratio(c: View) -> Found:
    """With one ratio or value a sequence the gradient reaches all tokens through the mean: the selection selects
    nothing."""
    loss = c.loss
    selects = gt(loss.top_entropy_quantile, 0) and lt(loss.top_entropy_quantile, 1)
    if selects and (loss.name in ("gspo", "gmpo") or loss.ratio_level == "sequence"):
        yield broken(
            f"{state(c, 'loss.top_entropy_quantile')} selects tokens, but {state(c, 'loss.name', 'loss.ratio_level')} "
            "reaches all of them through the mean.",
            {"loss.top_entropy_quantile": 1.0},
            to_loss(c, "ppo_clip"),
        )


def _null(c: View, key: str) -> bool:
    return getattr(c.loss, key.removeprefix("loss.")) is None


def _given(c: View, *keys: str) -> list[str]:
    """Those of the keys that are not null."""
    return [key for key in keys if not _null(c, key)]
