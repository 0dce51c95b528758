"""Configs for tests of the checks: composed once a choice of groups, values set in Hydra's own grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from grpo_cli.checks.engine import REMOVE
from grpo_cli.checks.overrides import apply
from grpo_cli.compose import compose
from grpo_cli.options import conf_dir, read_groups

GROUPS = read_groups([conf_dir()])


def config_of(overrides: Sequence[str]) -> dict[str, Any]:
    """What `grpo_cli.compose.compose` gives for these overrides, composed anew only for another choice of groups."""
    choices = [word for word in overrides if word.lstrip("+").partition("=")[0] in GROUPS.options]
    values = [word for word in overrides if word not in choices]
    # Interpolations follow the value that they name.
    lengths = [word for word in values if word.startswith("rollout.max_new_tokens=")]
    return with_values(_composed(tuple(choices + lengths)), values)


@cache
def _composed(choices: tuple[str, ...]) -> dict[str, Any]:
    composed = compose(list(choices))
    assert composed.config is not None, composed.findings
    return composed.config


def with_values(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The config with more values, as Hydra reads them."""
    changes: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        changes[override.key_or_group] = REMOVE if override.is_delete() else _plain(override.value())
    return apply(config, changes)


def _plain(value: Any) -> Any:
    """Hydra's value without the quotes that it remembers."""
    if isinstance(value, dict):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    return value.text if hasattr(value, "text") else value
