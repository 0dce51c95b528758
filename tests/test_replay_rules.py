"""`grpo replay` under configs that break rules: it refuses them, or its numbers are finite; never a traceback."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from check_cases import CASES, FORCE, KL_IN_REWARD, overlong
from check_helpers import config_of
from hypothesis import HealthCheck, given, settings
from test_checks_random import configs

from grpo_cli.checks import RULES, check
from grpo_cli.compose import Loaded
from grpo_cli.errors import ConfigError
from grpo_cli.replay import recompute
from grpo_cli.replay.dump import Row


def completion(reward: float, length: int) -> dict[str, Any]:
    """A completion with every list that a config can ask for."""
    return {
        "text": "x",
        "token_ids": [1] * length,
        "finish_reason": "stop",
        "rewards": {"number": reward},
        "logprobs": [-1.0 - 0.1 * token for token in range(length)],
        **{f"{policy}_logprobs": [-1.2] * length for policy in ("old", "ref", "sampler")},
        "entropies": [0.5] * length,
    }


GROUPS = [
    {
        "step": 1,
        "group_id": f"1-{number}",
        "prompt_id": "row-0",
        "prompt": "?",
        "prompt_token_ids": [1],
        "policy_version": 1,
        "completions": [completion(reward, 2 + index) for index, reward in enumerate(rewards)],
    }
    for number, rewards in enumerate([(1.0, 0.0, 0.5), (1.0, 1.0, 1.0), (0.0, 0.0, 1.0)])
]
ROWS = [Row(f"groups[{index}]", group) for index, group in enumerate(GROUPS)]
NO_FILTER = config_of(["filter=none"])["filter"]

ERRORS = [(rule, overrides) for rule, (overrides, _) in CASES.items() if RULES[rule].severity == "error"]
MORE = [
    ("kl_in_reward_needs_prev_logprobs", [*KL_IN_REWARD, *FORCE, "loss.kl_coef=0.1", "advantage=reinforce_pp"]),
    ("sapo_taus_positive", ["loss=sapo", "loss.tau_pos=null"]),
    ("advantage_eps_positive", ["advantage=passk", "advantage.eps=0"]),
    ("overlong_buffer_within_max", [overlong(max_tokens=3, buffer_tokens=0)]),
    ("value_given", ["reward.overlong={max_tokens:3,buffer_tokens:1,penalty:'???'}"]),
]
"""Second ways to break a rule, which end elsewhere in the mathematics."""


def replayed(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any] | None:
    """What replay prints under a resolved config; None where it refuses, as an error that says so."""

    def load(overrides, command, config_dir, terms):
        typed, found = check(config, command, terms)
        return Loaded(typed, config, found, [])

    monkeypatch.setattr(recompute, "load", load)
    refusal = None
    try:
        return recompute.run([], copy.deepcopy(ROWS)).as_json()
    except ConfigError as error:
        refusal = error
    assert any(finding.severity == "error" for finding in refusal.findings), "a refusal is an error"
    return None


def is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize(("rule", "overrides"), [*ERRORS, *MORE], ids=[rule for rule, _ in [*ERRORS, *MORE]])
def test_a_broken_rule_is_refused_or_leaves_every_number_finite(rule, overrides, monkeypatch):
    config = config_of(overrides)
    if RULES[rule].topic != "filter":
        config |= {"filter": NO_FILTER}  # the constant group reaches the mathematics too
    assert is_finite(replayed(config, monkeypatch))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(configs())
def test_any_config_is_refused_or_leaves_every_number_finite(config):
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert is_finite(replayed(config | {"filter": NO_FILTER}, monkeypatch))
