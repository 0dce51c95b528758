"""A value that can stand at a key: what the shipped option has there, or an example where it leaves the key open."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from grpo_cli.checks.engine import lookup
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
    "max_tokens": 256,
    "buffer_tokens": 64,
    "penalty": 1.0,
}
"""Values for keys that the shipped files leave open, by whole key or by last name."""


def default_option(section: str) -> str:
    """The option of a group that a plain `grpo train` has."""
    entries = yaml.safe_load((conf_dir() / f"{PRIMARY}.yaml").read_text(encoding="utf-8"))["defaults"]
    return next(entry[section] for entry in entries if isinstance(entry, dict) and section in entry)


def suggested_value(key: str, resolved: Mapping[str, Any]) -> Any:
    """A value of the right type for a key of the schema; a group of keys is built from its examples."""
    if key == "data.train" and lookup(resolved, "data.name") == "hf":
        return "openai/gsm8k:main:train"
    section, *parts = key.split(".")
    value = lookup(_shipped(section, _option(section, resolved)), ".".join(parts)) if parts else None
    if isinstance(value, str) and value.startswith("${"):
        value = lookup(resolved, value[2:-1])
    if key.startswith("replay.weights."):
        return 1.0
    if value is None or value == "???":
        value = _EXAMPLES.get(key, _EXAMPLES.get(parts[-1] if parts else key))
    return value


def _option(section: str, resolved: Mapping[str, Any]) -> str:
    name = lookup(resolved, f"{section}.name") if section in _BY_NAME else None
    return name if isinstance(name, str) else default_option(section)


@cache
def _shipped(section: str, option: str) -> dict[str, Any]:
    for name in (option, default_option(section)):
        file = conf_dir() / section / f"{name}.yaml"
        if file.is_file():
            return yaml.safe_load(file.read_text(encoding="utf-8"))
    return {}
