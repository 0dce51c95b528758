"""Which completions of a group the loss trains: one rule, for the packer and for `grpo replay`."""

from __future__ import annotations

from grpo_cli.schema import Config
from grpo_cli.types import Group


def trained(group: Group, cfg: Config) -> list[bool]:
    """For each completion: scored, in a kept group that has a baseline, not cut by `loss.mask_truncated`."""
    if group.dropped is not None or not has_baseline(group, cfg):
        return [False] * len(group.completions)
    masked = {"length"} if cfg.loss.mask_truncated else set()
    return [completion.scored and completion.finish_reason not in masked for completion in group.completions]


def has_trained_token(group: Group, cfg: Config) -> bool:
    """Whether anything of the group is trained on."""
    return any(yes and c.token_ids for yes, c in zip(trained(group, cfg), group.completions, strict=True))


def has_baseline(group: Group, cfg: Config) -> bool:
    """Whether two completions were scored; reinforce_pp compares inside no group, so one by design is enough there."""
    alone = cfg.advantage.name == "reinforce_pp" and len(group.completions) == 1
    return len(group.scored) >= (1 if alone else 2)
