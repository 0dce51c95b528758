"""Rules of the KL term and of the logprob passes that it needs."""

from __future__ import annotations

from grpo_cli.checks.engine import Changes, Found, View, broken, declare, error, ge, lt, state, warning
from grpo_cli.checks.quantities import kl_in_loss, kl_in_reward, old_pass, to_loss

REINFORCE_PP = ("reinforce_pp", "reinforce_pp_baseline")


@error("loss.force_on_policy_ratio", "loss.use_kl_in_reward", "loss.kl_coef", "loss.seq_logprob_error_threshold")
def kl_in_reward_needs_prev_logprobs(c: View) -> Found:
    """KL in the reward is taken between the old policy and the reference, so it needs the old policy's logprobs.
    loss.force_on_policy_ratio=true skips the pass that computes them, unless loss.seq_logprob_error_threshold asks for
    it. KL against logprobs that were never computed would corrupt every advantage. With loss.kl_coef=0 there is no KL,
    and nothing is missing."""
    if kl_in_reward(c) and not old_pass(c):
        yield broken(
            f"KL in the reward ({state(c, 'loss.kl_coef')}) needs logprobs of the old policy, but "
            "loss.force_on_policy_ratio=true skips that pass.",
            {"loss.force_on_policy_ratio": False},
            Changes({"loss.seq_logprob_error_threshold": 2.0}, "the pass then runs"),
            {"loss.kl_coef": 0},
        )


@error("loss.use_kl_in_reward", "advantage.name", "loss.kl_coef")
def kl_in_reward_needs_reinforce_pp(c: View) -> Found:
    """Only the reinforce_pp family puts the KL into the value of each token. Another advantage ignores it: no KL
    anywhere, and the reference is computed all the same."""
    if kl_in_reward(c) and c.advantage.name not in REINFORCE_PP:
        yield broken(
            f"loss.use_kl_in_reward=true with {state(c, 'loss.kl_coef')} is not read by "
            f"advantage.name={c.advantage.name}: there would be no KL at all.",
            {"loss.use_kl_in_reward": False},
            {"advantage.name": "reinforce_pp_baseline"},
        )


@warning("loss.use_kl_in_reward", "loss.kl_coef")
def kl_in_reward_needs_kl_coef(c: View) -> Found:
    """It passes, but with loss.kl_coef=0 there is no KL at all and no reference."""
    if c.loss.use_kl_in_reward and c.loss.kl_coef == 0:
        yield broken(
            "loss.use_kl_in_reward=true with loss.kl_coef=0: there is no KL at all; set loss.kl_coef to have one.",
            {"loss.use_kl_in_reward": False},
        )


@error("loss.kl_coef")
def kl_coef_not_negative(c: View) -> Found:
    """A negative coefficient rewards drifting away from the reference."""
    if lt(c.loss.kl_coef, 0):
        yield broken(
            f"{state(c, 'loss.kl_coef')} rewards drifting away from the reference.",
            {"loss.kl_coef": 0},
            {"loss.kl_coef": -c.loss.kl_coef},
        )


@warning("loss.kl_coef")
def kl_coef_below_one(c: View) -> Found:
    """From 1 on the KL outweighs the reward; the policy stays at the reference."""
    if ge(c.loss.kl_coef, 1):
        yield broken(f"{state(c, 'loss.kl_coef')} outweighs the reward.", {"loss.kl_coef": 0.1}, {"loss.kl_coef": 0})


@warning("loss.kl_estimator", "loss.kl_coef", "loss.use_kl_in_reward")
def loss_kl_needs_k2_or_k3(c: View) -> Found:
    """In the loss the gradient of k1 has expectation zero: noise, and no pull to the reference. k2 has the gradient of
    KL(policy||ref), k3 that of KL(ref||policy), as in DeepSeekMath."""
    if kl_in_loss(c) and c.loss.kl_estimator == "k1":
        yield broken(
            f"loss.kl_estimator=k1 in the loss ({state(c, 'loss.kl_coef')}) has a gradient of expectation zero.",
            Changes({"loss.kl_estimator": "k2"}, "gradient of KL to the reference"),
            Changes({"loss.kl_estimator": "k3"}, "DeepSeekMath"),
        )


@warning("loss.kl_estimator", "loss.kl_coef", "loss.use_kl_in_reward")
def reward_kl_needs_k1(c: View) -> Found:
    """In the reward, summed to the end of the completion, only k1 gives the gradient of the KL."""
    if kl_in_reward(c) and c.loss.kl_estimator != "k1":
        yield broken(
            f"loss.kl_estimator={c.loss.kl_estimator} in the reward does not give the gradient of the KL; k1 does.",
            {"loss.kl_estimator": "k1"},
        )


@warning("loss.kl_coef", "loss.name")
def dapo_needs_no_kl(c: View) -> Found:
    """DAPO drops the KL; a reference pass is paid for another method."""
    if c.loss.name == "dapo" and c.loss.kl_coef != 0:
        yield broken(
            f"loss.name=dapo has no KL, but {state(c, 'loss.kl_coef')} pays for a reference pass.",
            {"loss.kl_coef": 0},
            to_loss(c, "ppo_clip"),
        )


@warning("loss.seq_logprob_error_threshold", "loss.force_on_policy_ratio")
def force_on_policy_needs_no_error_threshold(c: View) -> Found:
    """The threshold needs the old policy's logprobs: the pass that loss.force_on_policy_ratio skips runs anyway."""
    if c.loss.force_on_policy_ratio and c.loss.seq_logprob_error_threshold is not None:
        yield broken(
            f"{state(c, 'loss.seq_logprob_error_threshold')} runs the pass that loss.force_on_policy_ratio=true skips.",
            {"loss.seq_logprob_error_threshold": None},
            {"loss.force_on_policy_ratio": False},
        )


@error("loss.seq_logprob_error_threshold")
def error_threshold_at_least_one(c: View) -> Found:
    """The threshold is compared with the mean of exp(absolute difference), which is never below 1: every sequence
    would be masked."""
    if lt(c.loss.seq_logprob_error_threshold, 1):
        yield broken(
            f"{state(c, 'loss.seq_logprob_error_threshold')} is below 1, the least that a sequence can have: all are "
            "masked.",
            {"loss.seq_logprob_error_threshold": 2.0},
            {"loss.seq_logprob_error_threshold": None},
        )


@warning("loss.seq_logprob_error_threshold")
def error_threshold_above_noise(c: View) -> Found:
    """Rounding between engine and trainer alone reaches 1.05 and masks many sequences."""
    if ge(c.loss.seq_logprob_error_threshold, 1) and lt(c.loss.seq_logprob_error_threshold, 1.05):
        yield broken(
            f"{state(c, 'loss.seq_logprob_error_threshold')} is within rounding between engine and trainer.",
            {"loss.seq_logprob_error_threshold": 1.5},
        )


declare(
    "lora_reference_is_start_policy", "error", "kl", "start", "model.path", "model.lora", "loss.kl_coef",
    why="""With model.lora the reference is the base model with the adapter off. Where model.path holds an adapter
    already, that is the bare base: the KL would pull away from the policy that the run starts from. Merge the adapter
    into model.path, or set loss.kl_coef=0.""",
)  # fmt: skip
