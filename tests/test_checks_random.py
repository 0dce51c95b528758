"""Random configs: the checks never crash, their fixes always hold, and what they let through can be built."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from check_helpers import GROUPS, config_of, with_values
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from grpo_cli.advantage import assign
from grpo_cli.checks import RULES, check
from grpo_cli.checks.keys import annotation_of, choices, known_keys, nullable
from grpo_cli.checks.overrides import SEPARATOR, apply, read_first
from grpo_cli.filter import make_filter
from grpo_cli.loss import Tokens, policy_loss, prepare
from grpo_cli.types import Completion, Group, Prompt

INTEGERS = [0, 1, 2, 3, 8, 64, 256, 600, 5000]
NUMBERS = [-1.0, 0.0, 1e-6, 3e-4, 0.01, 0.2, 0.28, 0.5, 0.95, 1.0, 1.04, 2.0, 3.0, 40.0]
TEXTS = [
    "",
    "exact",
    "total",
    "/here",
    "org/name",
    "a.b",
    "sdpa",
    "flash_attention_2",
    "http://gpu7.org",
    "../x",
    "never",
]
TERMS = [
    [],
    [{"name": "exact", "weight": 1.0}],
    [{"name": "exact", "weight": -1.0}, {"name": "number", "weight": 0.5}],
    [{"name": "number", "weight": 0.0}, {"name": "number", "weight": 0.0}],
    [{"name": "python", "weight": 1.0, "path": "a.py", "function": "f"}],
    [{"name": "python", "weight": 1.0, "path": "a", "function": "f.g"}, {"name": "os.system", "weight": 1}],
    [{"name": "wordy", "weight": 1.0}],
    [{"name": "regex", "weight": 1.0}, {"weight": 2}],
]
LISTS: dict[str, list[Any]] = {
    "reward.terms": TERMS,
    "trainer.betas": [[0.9, 0.99], [0.9], [1.0, 0.9]],
    "rollout.stop": [None, [], [""], ["a", ""]],
    "rollout.devices": [None, [], [0], [1], [1, 2, 3]],
    "eval.k": [[1], [0], [4]],
    "logger.wandb.tags": [[], ["a"]],
    "model.lora": [None, {"rank": 0, "alpha": 1.0, "dropout": 0.1, "target_modules": []},
                   {"rank": 8, "alpha": 16.0, "dropout": 0.0, "target_modules": ["q_proj"]}],
    "reward.overlong": [None, {"max_tokens": 256, "buffer_tokens": 64, "penalty": 1.0},
                        {"max_tokens": 600, "buffer_tokens": 0, "penalty": 3.0},
                        {"max_tokens": 200, "buffer_tokens": 300, "penalty": -1.0}],
    "replay.weights": [None, {"exact": 1.0}],
}  # fmt: skip
DRAWN_WHOLE = ("model.lora.", "reward.overlong.")
"""Groups of keys that may be null are drawn as a whole."""


def values_of(key: str, config: dict[str, Any]) -> list[Any]:
    """Values of the right type for a key, those beside its bounds among them."""
    if key in LISTS:
        return LISTS[key]
    if listed := choices(key, config):
        listed = [value for value in listed if value is not None]
    kinds = annotation_of(key, config)
    kinds = get_args(kinds) if nullable(key, config) else (kinds,)
    drawn = listed or [
        value
        for kind, values in ((bool, [True, False]), (int, INTEGERS), (float, NUMBERS), (str, TEXTS))
        if kind in kinds
        for value in values
    ]
    return [None, *drawn] if nullable(key, config) else drawn


def keys_of(config: dict[str, Any]) -> list[str]:
    keys = [key for key in known_keys(config) if not key.endswith(".name") or key == "run.name"]
    keys = [key for key in keys if not key.startswith(DRAWN_WHOLE)]
    return [key for key in keys if values_of(key, config)]


@st.composite
def configs(draw) -> dict[str, Any]:
    groups = ("data", "reward", "rollout", "filter", "advantage", "loss")
    config = config_of([f"{group}={draw(st.sampled_from(GROUPS.options[group]))}" for group in groups])
    open_values = {"data.train": "train.jsonl"} if config["data"]["train"] == "???" else {}
    keys = draw(st.lists(st.sampled_from(keys_of(config)), max_size=8, unique=True))
    return apply(config, open_values | {key: draw(st.sampled_from(values_of(key, config))) for key in keys})


def errors_of(findings) -> set[tuple[str, frozenset[str]]]:
    return {(f.rule, frozenset(f.keys)) for f in findings if f.severity == "error"}


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(configs())
def test_every_printed_fix_mends_its_finding_and_brings_no_new_error(config):
    _, findings = check(config)
    for finding in findings:
        for alternative in finding.fix.split(SEPARATOR):
            _, after = check(with_values(config, read_first(alternative)))
            assert (finding.rule, frozenset(finding.keys)) not in {(f.rule, frozenset(f.keys)) for f in after}, finding
            assert errors_of(after) <= errors_of(findings), (finding, alternative)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(configs(), st.sampled_from(["train", "eval", "replay"]))
def test_a_config_has_its_type_unless_an_error_says_why_not(config, command):
    typed, findings = check(config, command, ["exact"] if command == "replay" else None)
    shapeless = [finding.rule for finding in findings if RULES[finding.rule].topic == "shape"]
    if shapeless:
        assert typed is None
    if typed is None:
        assert any(finding.severity == "error" for finding in findings)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sampled_from(["train", "eval", "replay"]),
    st.sampled_from(sorted(known_keys(config_of([])))),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("???"),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=3,
    ),
)
def test_any_value_at_any_key_is_judged_and_never_crashes(command, key, value):
    typed, findings = check(apply(config_of([]), {key: value}), command, ["exact"] if command == "replay" else None)
    assert typed is not None or errors_of(findings)


def two_groups() -> list[Group]:
    """Two prompts with two scored completions of two tokens each."""
    return [
        Group(
            f"1-{index}",
            Prompt(f"row-{index}", "p", [1], None),
            [
                Completion("ab", [5, 6], "stop", {"exact": float(value)}, float(value), float(value),
                           sampler_logprobs=[-1.0, -2.0])
                for value in (0, 1)
            ],
            step=1,
            policy_version=0,
        )
        for index in range(2)
    ]  # fmt: skip


@settings(max_examples=25, deadline=None, derandomize=True)
@given(configs())
def test_what_is_let_through_builds_its_filter_advantage_and_loss(config):
    typed, findings = check(config)
    if errors_of(findings):
        assume(False)
    assert typed is not None
    kept, _ = make_filter(typed).split(two_groups())
    assign(kept, typed, weights={"exact": 1.0})
    advantages = [completion.advantage for group in kept for completion in group.completions]
    if not advantages:
        return
    assert all(isinstance(advantage, float) and math.isfinite(advantage) for advantage in advantages)
    count = 2 * len(advantages)
    rows = torch.arange(count) // 2
    tokens = Tokens(
        seq_T=rows,
        length_N=torch.full((len(advantages),), 2),
        trained_N=torch.ones(len(advantages), dtype=torch.bool),
        advantage_N=torch.tensor(advantages),
        **{name: torch.full((count,), -1.5) for name in ("sampler_T", "old_T", "ref_T", "entropy_T")},
    )
    prepare([[tokens]], typed, lambda tensor, *_: tensor)
    logprobs = torch.full((count,), -1.0, requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.ones(count, requires_grad=True), tokens, typed)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
