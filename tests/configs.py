"""Typed configs and small groups for tests."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from grpo_cli.compose import compose
from grpo_cli.schema import Config, parse
from grpo_cli.shaping import shape
from grpo_cli.types import Completion, Group, Prompt


@cache
def make_config(*overrides: str) -> Config:
    """The default config with overrides, unchecked. Only the groups are composed, once a choice: composing is slow."""
    choices = tuple(override for override in overrides if "." not in override.partition("=")[0])
    resolved = copy.deepcopy(_composed(choices))
    values = [override for override in overrides if override not in choices]
    for value in OverridesParser.create().parse_overrides(values):
        *sections, name = value.key_or_group.split(".")
        section = resolved
        for part in sections:
            section = section[part]
        assert name in section, value.key_or_group
        section[name] = value.value()
    return parse(resolved)


@cache
def _composed(choices: tuple[str, ...]) -> dict[str, Any]:
    composed = compose(list(choices))
    assert composed.config is not None, composed.findings
    assert not composed.findings, composed.findings
    return composed.config


def make_group(
    *rewards: float | dict | None, lengths: list[int] | None = None, group_id: str = "1-0", version: int = 1
) -> Group:
    """A group whose completions have these rewards (of the term `number`, or of the named terms), weight 1 each."""
    completions = []
    for index, reward in enumerate(rewards):
        length = 2 if lengths is None else lengths[index]
        terms = reward if isinstance(reward, dict) else {"number": reward}
        completion = Completion("", list(range(length)), "stop", rewards=terms)
        shape(completion, dict.fromkeys(terms, 1.0), None)
        completions.append(completion)
    return Group(group_id, Prompt(f"row-{group_id}", "", [1], "0"), completions, step=1, policy_version=version)
