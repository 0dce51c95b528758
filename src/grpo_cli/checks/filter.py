"""Rules of the group filter."""

from __future__ import annotations

from grpo_cli.checks.engine import Found, View, broken, declare, error, ge, state, warning
from grpo_cli.checks.quantities import carries, corrects, to_filter
from grpo_cli.options import nearest
from grpo_cli.schema import WHOLE_REWARD, term_names


@error("filter.metric", "reward.terms")
def filter_metric_known(c: View) -> Found:
    """filter.metric names the reward that decides: unshaped, total, or one of reward.terms. A misspelt one has no
    values, so every group or none would be dropped."""
    known = [*WHOLE_REWARD, *term_names(c.reward.terms)]
    if c.filter.metric not in known:
        best = nearest(c.filter.metric, known)
        yield broken(
            f"{state(c, 'filter.metric')} is none of {', '.join(known)}.",
            {"filter.metric": best},
        )


@warning("filter.metric", "filter.name", "reward.overlong")
def filter_on_unshaped_reward(c: View) -> Found:
    """The filter decides on the reward with the overlong penalty. Groups whose answers are all wrong then differ by
    length alone, survive, and train shortness."""
    if c.filter.name != "none" and c.filter.metric == "total" and c.reward.overlong is not None:
        yield broken(
            f"filter.metric=total includes reward.overlong: groups that are all wrong differ by length and pass "
            f"filter.name={c.filter.name}.",
            {"filter.metric": "unshaped"},
        )


@error("filter.max_rounds", "filter.name")
def dynamic_sampling_needs_max_rounds(c: View) -> Found:
    """dynamic_sampling generates until the step is full. Without a bound it would go on for ever when no group has
    signal."""
    rounds = c.filter.max_rounds
    if c.filter.name == "dynamic_sampling" and (rounds is None or rounds < 1):
        yield broken(f"{state(c, 'filter.max_rounds')} sets no bound to dynamic sampling.", {"filter.max_rounds": 10})


@warning("filter.max_rounds", "filter.name")
def dynamic_sampling_needs_a_second_round(c: View) -> Found:
    """One round never replaces a dropped group: that is zero_std under another name."""
    if c.filter.name == "dynamic_sampling" and c.filter.max_rounds == 1:
        yield broken(
            "filter.max_rounds=1 never replaces a dropped group: this is zero_std.",
            {"filter.max_rounds": 2},
            to_filter(c, "zero_std"),
        )


@error("filter.name", "filter.max_rounds")
def max_rounds_needs_dynamic_sampling(c: View) -> Found:
    """Only dynamic_sampling resamples. With another filter dropped groups are not replaced, as the key suggests."""
    if c.filter.name != "dynamic_sampling" and c.filter.max_rounds is not None:
        yield broken(
            f"filter.max_rounds={c.filter.max_rounds} is read by dynamic_sampling only, not by "
            f"filter.name={c.filter.name}.",
            {"filter.name": "dynamic_sampling"},
            {"filter.max_rounds": None},
        )


@error("filter.surplus", "filter.name", "loss.force_on_policy_ratio")
def surplus_carry_excludes_force_on_policy(c: View) -> Found:
    """Carried groups come from an older policy, yet loss.force_on_policy_ratio declares their ratio 1."""
    if carries(c) and c.loss.force_on_policy_ratio:
        yield broken(
            "filter.surplus=carry trains groups of an older policy, whose ratio loss.force_on_policy_ratio=true "
            "declares 1.",
            {"filter.surplus": "discard"},
        )


@warning("filter.surplus", "filter.name", "loss.correction.mode")
def surplus_carry_needs_correction(c: View) -> Found:
    """Carried groups are a version old, and without loss.correction nothing weighs that."""
    if carries(c) and not c.loss.force_on_policy_ratio and not corrects(c):
        yield broken(
            "filter.surplus=carry trains groups that are a version old, and loss.correction.mode=none weighs nothing.",
            {"filter.surplus": "discard"},
            {"loss.correction.mode": "truncate", "loss.correction.high": 2.0},
        )


@error("filter.low", "filter.high", "filter.name")
def reward_range_needs_a_bound(c: View) -> Found:
    """reward_range without bounds asks for no range: it is zero_std under another name."""
    if c.filter.name == "reward_range" and c.filter.low is None and c.filter.high is None:
        yield broken(
            "filter.name=reward_range with filter.low=null and filter.high=null asks for no range.",
            {"filter.low": 0.1, "filter.high": 0.9},
            {"filter.name": "zero_std"},
        )


@error("filter.low", "filter.high", "filter.name")
def reward_range_low_below_high(c: View) -> Found:
    """No mean lies in an empty range, so every group would be dropped."""
    low, high = c.filter.low, c.filter.high
    if c.filter.name == "reward_range" and ge(low, high):
        mended = {"filter.low": high, "filter.high": low} if low > high else {"filter.low": None}
        yield broken(f"filter.low={low} is not below filter.high={high}: every group is dropped.", mended)


@error("filter.name", "filter.low", "filter.high")
def range_bounds_need_reward_range(c: View) -> Found:
    """The bounds are read by reward_range only; with another filter nothing is cut."""
    given = [f"filter.{key}" for key in ("low", "high") if getattr(c.filter, key) is not None]
    if c.filter.name != "reward_range" and given:
        yield broken(
            f"{state(c, *given)}: read by reward_range only, not by filter.name={c.filter.name}.",
            {"filter.name": "reward_range"},
            dict.fromkeys(given),
        )


@warning("filter.max_empty_steps", "filter.name")
def empty_steps_need_a_limit(c: View) -> Found:
    """A run whose groups are all dropped would burn every step and never stop itself."""
    if c.filter.name != "none" and c.filter.max_empty_steps is None:
        yield broken(
            f"filter.max_empty_steps=null: a run whose groups are all dropped by {c.filter.name} never stops itself.",
            {"filter.max_empty_steps": 20},
        )


@warning("filter.name", "advantage.name")
def group_filter_needs_group_advantage(c: View) -> Found:
    """reinforce_pp takes the mean of the step as the baseline. Groups of equal reward do carry signal there, and the
    filter loses them."""
    if c.filter.name != "none" and c.advantage.name == "reinforce_pp":
        yield broken(
            f"filter.name={c.filter.name} drops groups of equal reward, which carry signal for "
            "advantage.name=reinforce_pp.",
            to_filter(c, "none"),
            {"advantage.name": "reinforce_pp_baseline"},
        )


declare(
    "resampling_has_prompts", "warning", "filter", "start", "filter.max_rounds", "trainer.prompts_per_step",
    why="""trainer.prompts_per_step times filter.max_rounds is more than the prompts in the data. One step may draw a
    prompt twice or consume a whole epoch. Lower one of the two, or add prompts.""",
)  # fmt: skip
