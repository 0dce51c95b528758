"""A value that can stand at a key: what the shipped option has there, or an example where it leaves the key open."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from grpo_cli.checks.engine import lookup
from grpo_cli.checks.keys import closest_member, members, tag
from grpo_cli.options import PRIMARY, conf_dir

_BY_NAME = ("data", "reward", "rollout", "filter", "advantage", "loss")
"""Groups whose file is named like their option's `name`."""

_EXAMPLES = {
    "model.path": "builtin:smollm2-135m",
    "data.train": "train.jsonl",
    "path": "reward.py",
    "function": "score",
    "pattern": "[0-9]+",
    "weight": 1.0,
    "rank": 16,
    "alpha": 32.0,
    "dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
    "penalty": 1.0,
}
"""Values for keys that the shipped files leave open, by whole key or by last name."""


@cache
def default_option(section: str) -> str:
    """The option of a group that a plain `grpo train` has."""
    entries = yaml.safe_load((conf_dir() / f"{PRIMARY}.yaml").read_text(encoding="utf-8"))["defaults"]
    return next(entry[section] for entry in entries if isinstance(entry, dict) and section in entry)


def suggested_value(key: str, resolved: Mapping[str, Any]) -> Any:
    """A value of the right type for a key of the schema; a group of keys is built from its examples."""
    if key == "data.train" and lookup(resolved, "data.name") == "hf":
        return "openai/gsm8k:main:train"
    value = shipped_here(key, resolved)
    if key.startswith("replay.weights."):
        return 1.0
    if key.startswith("reward.overlong."):
        value = _overlong(resolved).get(key.rpartition(".")[2])
    if value is None or value == "???":
        value = _EXAMPLES.get(key, _EXAMPLES.get(key.rpartition(".")[2]))
    return value


def shipped_here(key: str, resolved: Mapping[str, Any]) -> Any:
    """What the file of the chosen option has at a key."""
    section, _, inner = key.partition(".")
    return lookup(shipped_values(section, _option(section, resolved), resolved), inner)


def _overlong(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A ramp over the last quarter of the longest completion, or of the length that is given."""
    given, longest = (lookup(resolved, key) for key in ("reward.overlong.max_tokens", "rollout.max_new_tokens"))
    length = next((count for count in (given, longest) if type(count) is int and count > 0), 256)
    return {"max_tokens": length, "buffer_tokens": max(1, length // 4)}


def shipped_values(section: str, option: str, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What the file of an option says, `${KEY}` replaced by the value of that key in `resolved`."""
    return {key: _interpolated(value, resolved) for key, value in _shipped(section, option).items()}


def _interpolated(value: Any, resolved: Mapping[str, Any]) -> Any:
    return lookup(resolved, value[2:-1]) if isinstance(value, str) and value.startswith("${") else value


def with_option(resolved: Mapping[str, Any], section: str, option: str) -> dict[str, Any]:
    """The values of a group after another option of it is chosen, as composing them anew would give.

    They are those of that option's file, but for what differs from the file of the option that was there: that was
    asked for and goes on top of either.
    """
    values = resolved.get(section)
    now = values if isinstance(values, Mapping) else {}
    before = shipped_values(section, fitting_option(section, now), resolved)
    asked = {key: value for key, value in now.items() if key not in before or before[key] != value}
    return {**shipped_values(section, option, resolved), **{key: asked[key] for key in asked if key != "name"}}


def fitting_option(section: str, values: Mapping[str, Any]) -> str:
    """The option whose file the values of a group came from."""
    options, name = members(section), values.get("name")
    if options and (not isinstance(name, str) or name not in options):
        return tag(closest_member(options, values))
    return misnamed(section, values) or (name if isinstance(name, str) else default_option(section))


def misnamed(section: str, values: Mapping[str, Any]) -> str | None:
    """The option whose file the values of a group came from, where their `name` is that of another; else None.

    Its keys are all there and none that the named one would have brought. Keys that only it has count where one is as
    shipped: a key that somebody added to the named option is not.
    """
    options, name = members(section), values.get("name")
    if not isinstance(name, str) or name not in options:
        return None
    named = set(options[name].model_fields)
    for other, model in sorted(options.items(), key=lambda option: -len(option[1].model_fields)):
        keys = set(model.model_fields)
        own, lacks = keys - named, named - keys
        if not keys <= set(values) or lacks & set(values):
            continue
        if lacks or any(values[key] == _shipped(section, other)[key] for key in own):
            return other
    return None


def _option(section: str, resolved: Mapping[str, Any]) -> str:
    values = resolved.get(section)
    if section in _BY_NAME and isinstance(values, Mapping):
        return fitting_option(section, values)
    return default_option(section)


@cache
def _shipped(section: str, option: str) -> dict[str, Any]:
    for name in (option, default_option(section)):
        file = conf_dir() / section / f"{name}.yaml"
        if file.is_file():
            return yaml.safe_load(file.read_text(encoding="utf-8"))
    return {}
