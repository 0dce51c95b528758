"""Rules of the advantage estimators."""

from __future__ import annotations

from grpo_cli.checks.engine import Found, View, broken, error, le, lt, state, warning
from grpo_cli.checks.quantities import to_advantage


@error("advantage.leave_one_out", "advantage.name")
def leave_one_out_needs_grpo(c: View) -> Found:
    """Only grpo reads advantage.leave_one_out (rloo always does so); every other estimator has its own baseline."""
    if c.advantage.leave_one_out and c.advantage.name not in ("grpo", "rloo"):
        yield broken(
            f"advantage.leave_one_out=true is not read by advantage.name={c.advantage.name}: it has its own baseline.",
            {"advantage.leave_one_out": False},
            to_advantage(c, "grpo"),
        )


@warning("rollout.num_generations", "advantage.name", "advantage.leave_one_out", "advantage.normalize")
def normalized_leave_one_out_needs_three_generations(c: View) -> Found:
    """With two generations, a leave-one-out baseline and the deviation of the group, both advantages are +-1.41
    whatever the gap between the rewards: their size is lost."""
    advantage = c.advantage
    if (
        advantage.name == "grpo"
        and advantage.leave_one_out
        and advantage.normalize == "group"
        and c.rollout.num_generations == 2
    ):
        yield broken(
            "rollout.num_generations=2 with advantage.leave_one_out=true and advantage.normalize=group makes every "
            "advantage +-1.41.",
            {"rollout.num_generations": 3},
            {"advantage.normalize": "none"},
        )


@error("advantage.normalize", "advantage.name")
def dr_grpo_needs_normalize_none(c: View) -> Found:
    """Dr. GRPO divides by no deviation; the value would be ignored."""
    if c.advantage.name == "dr_grpo" and c.advantage.normalize != "none":
        yield broken(
            f"advantage.normalize={c.advantage.normalize} is not read by advantage.name=dr_grpo.",
            {"advantage.normalize": "none"},
            {"advantage.name": "grpo"},
        )


@warning("advantage.name", "advantage.normalize", "loss.name")
def dr_grpo_loss_needs_normalize_none(c: View) -> Found:
    """loss=dr_grpo with a normalised advantage is half of Dr. GRPO: the difficulty bias that it removes stays in."""
    if c.loss.name == "dr_grpo" and c.advantage.name == "grpo" and c.advantage.normalize != "none":
        yield broken(
            f"loss.name=dr_grpo with advantage.name=grpo advantage.normalize={c.advantage.normalize} keeps the "
            "difficulty bias that Dr. GRPO removes.",
            to_advantage(c, "dr_grpo"),
        )


@error("advantage.normalize", "advantage.name")
def normalize_needs_grpo(c: View) -> Found:
    """Only grpo reads advantage.normalize; the normalisation that was asked for would not happen."""
    if c.advantage.name not in ("grpo", "dr_grpo") and c.advantage.normalize != "none":
        yield broken(
            f"advantage.normalize={c.advantage.normalize} is not read by advantage.name={c.advantage.name}.",
            {"advantage.normalize": "none"},
            {"advantage.name": "grpo"},
        )


@error("advantage.eps")
def advantage_eps_positive(c: View) -> Found:
    """eps is added to the deviation. Without it rounding noise becomes advantages of thousands, or NaN."""
    if le(c.advantage.eps, 0):
        yield broken(f"{state(c, 'advantage.eps')} is not positive.", {"advantage.eps": 1e-6})


@error("advantage.clip")
def advantage_clip_positive(c: View) -> Found:
    """A clip of 0 or less clamps every advantage to 0: nothing trains."""
    if le(c.advantage.clip, 0):
        yield broken(
            f"{state(c, 'advantage.clip')} clamps every advantage to 0.",
            {"advantage.clip": None},
            {"advantage.clip": 5.0},
        )


@warning("advantage.name", "reward.terms", "reward.overlong")
def gdpo_needs_two_terms(c: View) -> Found:
    """gdpo normalises each reward term alone. With one term (the overlong penalty counted as one) it is grpo,
    normalised twice."""
    terms = len(c.reward.terms) + (c.reward.overlong is not None)
    if c.advantage.name == "gdpo" and terms < 2:
        yield broken(
            f"advantage.name=gdpo normalises each term alone, but there is {terms} (reward.terms, and reward.overlong "
            "as one); add a term.",
            to_advantage(c, "grpo"),
        )


@warning("reward.overlong", "reward.terms", "advantage.name")
def maxrl_needs_non_negative_rewards(c: View) -> Found:
    """maxrl divides by the mean reward. Negative weights or the overlong penalty bring it below or near 0, which makes
    the advantage 0 or huge."""
    negative = [index for index, term in enumerate(c.reward.terms) if lt(term.weight, 0)]
    if c.advantage.name == "maxrl" and (negative or c.reward.overlong is not None):
        given = [f"reward.terms.{index}.weight" for index in negative]
        given += ["reward.overlong"] * (c.reward.overlong is not None)
        mended = {key: None if key == "reward.overlong" else 0.0 for key in given}
        yield broken(
            f"advantage.name=maxrl divides by the mean reward, which {state(c, *given)} can make negative.",
            mended,
            to_advantage(c, "grpo"),
        )
