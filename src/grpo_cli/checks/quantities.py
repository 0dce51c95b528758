"""What the rules' conditions are made of: derived numbers and the named situations of the rule list."""

from __future__ import annotations

import ipaddress
import re
from typing import Any
from urllib.parse import SplitResult, urlsplit

from grpo_cli.checks.engine import View, gt, lt
from grpo_cli.passes import decide_passes
from grpo_cli.schema import Config

CLIPPED = ("ppo_clip", "dapo", "dr_grpo")
"""Losses with PPO's clipped surrogate whose ratio level is free."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"[\w.-]+|[0-9a-f:.]+(%\w+)?")
"""A name or an IPv4 address, or an IPv6 address without its brackets."""


def sequences(c: View) -> int:
    """S: sequences a step."""
    return c.trainer.prompts_per_step * c.rollout.num_generations


def processes(c: View) -> int:
    """W: processes of all nodes."""
    return c.trainer.nproc_per_node * c.trainer.nnodes


def several(c: View) -> bool:
    """SEVERAL: more than one optimizer update on the same rollouts."""
    return c.trainer.updates_per_step * c.trainer.epochs_per_step > 1


def kl_in_reward(c: View) -> bool:
    """KL_REWARD."""
    return c.loss.kl_coef != 0 and c.loss.use_kl_in_reward


def kl_in_loss(c: View) -> bool:
    """KL_LOSS."""
    return c.loss.kl_coef != 0 and not c.loss.use_kl_in_reward


def old_pass(c: View) -> bool:
    """OLD_PASS: asked of the one function that decides the passes."""
    return decide_passes(c).old.runs


def corrects(c: View) -> bool:
    """CORRECTS: the gap between sampler and trainer is weighed."""
    return c.loss.correction.mode != "none"


def cut_sampling(c: View) -> dict[str, Any]:
    """The sampling keys that cut the distribution, each with the value that is off."""
    rollout = c.rollout
    cut: dict[str, Any] = {}
    if lt(rollout.top_p, 1):
        cut["rollout.top_p"] = 1.0
    if rollout.top_k not in (None, 0, -1):
        cut["rollout.top_k"] = -1
    if rollout.min_p not in (None, 0):
        cut["rollout.min_p"] = 0.0
    return cut


def sequence_loss(c: View) -> bool:
    """SEQ_LOSS: one ratio a sequence."""
    return c.loss.name == "gspo" or (c.loss.name in CLIPPED and c.loss.ratio_level == "sequence")


def carries(c: View) -> bool:
    """CARRY: surplus groups are kept for the next step."""
    return c.filter.name == "dynamic_sampling" and c.filter.surplus == "carry"


def colocated(c: View) -> bool:
    """COLOCATED: engine and trainer take turns on the same devices."""
    return c.rollout.name == "vllm" and c.rollout.devices is None


def file_data(c: View) -> bool:
    """FILE_DATA: the rows come from files."""
    return c.data.name in ("jsonl", "hf")


def rollout_dtype(c: View) -> str:
    """`rollout.dtype`, where auto is `model.dtype`."""
    return c.model.dtype if c.rollout.dtype == "auto" else c.rollout.dtype


def context(c: View) -> int:
    """Longest sequence in tokens that is trained on: prompt and completion."""
    return c.data.max_prompt_tokens + c.rollout.max_new_tokens


def completion_limits(c: View | Config, command: str) -> dict[str, int]:
    """The keys that bound a completion, with their values: evaluation, where there is any, has its own."""
    limits = {"rollout.max_new_tokens": c.rollout.max_new_tokens}
    if command == "eval" or c.trainer.eval_every is not None:
        limits["eval.max_new_tokens"] = c.eval.max_new_tokens
    return limits


def multiply(c: View) -> str:
    """S as a sum that a reader can follow."""
    return (
        f"{sequences(c)} sequences a step (trainer.prompts_per_step={c.trainer.prompts_per_step} x "
        f"rollout.num_generations={c.rollout.num_generations})"
    )


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of a number up to a limit, falling; never empty, since 1 is one."""
    return [candidate for candidate in range(min(number, limit), 0, -1) if number % candidate == 0]


def recommended_clip(c: View) -> tuple[float | None, float | None]:
    """The published clip range of the chosen loss."""
    if sequence_loss(c):
        return 3e-4, 4e-4
    return {"dapo": (0.2, 0.28), "gmpo": (0.4, 0.4), "cispo": (None, 4.0)}.get(c.loss.name, (0.2, 0.2))


def to_loss(c: View, name: str) -> dict[str, Any]:
    """The changes that make the loss `name` of another one: the keys that only one of them reads included."""
    loss = c.loss
    changes: dict[str, Any] = {"loss.name": name}
    level = "sequence" if name == "gspo" else "token"
    if loss.ratio_level != level:
        changes["loss.ratio_level"] = level
    if name in ("gspo", "sapo") and loss.aggregation != "seq_mean_token_mean":
        changes["loss.aggregation"] = "seq_mean_token_mean"
    low, high = {"gspo": (3e-4, 4e-4), "sapo": (None, None), "reinforce": (None, None)}.get(name, (0.2, 0.2))
    if loss.force_on_policy_ratio or (loss.name in CLIPPED and name == "ppo_clip" and gt(loss.clip_high, 0.01)):
        low, high = loss.clip_low, loss.clip_high
    changes |= {key: bound for key, bound, now in _bounds(loss, low, high) if bound != now}
    taus = (1.0, 1.05) if name == "sapo" else (None, None)
    for key, tau, now in (("loss.tau_pos", taus[0], loss.tau_pos), ("loss.tau_neg", taus[1], loss.tau_neg)):
        if (tau is None) != (now is None):
            changes[key] = tau
    if loss.dual_clip is not None and name not in (*CLIPPED, "gspo"):
        changes["loss.dual_clip"] = None
    return changes


def _bounds(loss: View, low: float | None, high: float | None) -> list[tuple[str, float | None, float | None]]:
    return [("loss.clip_low", low, loss.clip_low), ("loss.clip_high", high, loss.clip_high)]


def to_filter(c: View, name: str) -> dict[str, Any]:
    """The changes that make the filter `name` of another one."""
    changes: dict[str, Any] = {"filter.name": name}
    if name != "dynamic_sampling" and c.filter.max_rounds is not None:
        changes["filter.max_rounds"] = None
    if name != "reward_range":
        changes |= {f"filter.{key}": None for key in ("low", "high") if getattr(c.filter, key) is not None}
    return changes


def to_advantage(c: View, name: str) -> dict[str, Any]:
    """The changes that make the estimator `name` of another one."""
    changes: dict[str, Any] = {"advantage.name": name}
    if name == "grpo" and c.advantage.normalize == "none" and c.advantage.name != "grpo":
        changes["advantage.normalize"] = "group"
    if name != "grpo" and c.advantage.normalize != "none":
        changes["advantage.normalize"] = "none"
    if name not in ("grpo", "rloo") and c.advantage.leave_one_out:
        changes["advantage.leave_one_out"] = False
    return changes


def split_url(url: str) -> SplitResult | None:
    """The parts of an http(s) address with a host and, where it names one, a port; None where it is not one."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and _HOST.fullmatch(parts.hostname or "") and parts.port != 0:
            return parts
    except ValueError:
        pass
    return None


def crosses_open_network(host: str) -> bool:
    """Whether a host is a public address, or a name with a dot."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host
