"""Every rule: a config that breaks it is named, and the printed fix mends it without a new error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from check_cases import CASES, VLLM
from check_helpers import config_of, with_values

from grpo_cli.checks import RULES, check
from grpo_cli.checks.overrides import SEPARATOR, read_first
from grpo_cli.compose import compose

PAGE = Path(__file__).parents[2] / "shared" / "validation-rules.md"
"""The list of rules, where it lies beside the checkout."""

OWN_CONDITIONS = {rule for rule, entry in RULES.items() if entry.when == "config"}


@pytest.fixture(autouse=True)
def no_wandb_key(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def test_a_case_for_every_rule_that_the_config_alone_breaks():
    assert set(CASES) | {"group_present"} == OWN_CONDITIONS


@pytest.mark.parametrize("value", [None, "zero_std", []])
def test_group_present(value):
    for config in (config_of([]) | {"filter": value}, {k: v for k, v in config_of([]).items() if k != "filter"}):
        typed, findings = check(config)
        assert typed is None
        assert [(finding.rule, finding.keys, finding.fix) for finding in findings] == [
            ("group_present", ("filter",), "filter=none")
        ]


@pytest.mark.parametrize("rule", CASES)
def test_rule_is_named_with_the_key_to_change_first(rule):
    overrides, head = CASES[rule]
    _, findings = check(config_of(overrides))
    found = [finding for finding in findings if finding.rule == rule]
    assert len(found) == 1, findings
    assert found[0].severity == RULES[rule].severity
    assert found[0].keys[0] == head
    assert len(set(found[0].keys)) == len(found[0].keys)
    assert found[0].message[-1] == "."


@pytest.mark.parametrize("rule", CASES)
def test_printed_fix_mends_without_a_new_error(rule):
    overrides, _ = CASES[rule]
    config = config_of(overrides)
    _, before = check(config)
    broken = next(finding for finding in before if finding.rule == rule)
    for alternative in broken.fix.split(SEPARATOR):
        _, after = check(with_values(config, read_first(alternative)))
        assert rule not in {finding.rule for finding in after}, alternative
        errors = {finding.rule for finding in before if finding.severity == "error"}
        assert {finding.rule for finding in after if finding.severity == "error"} <= errors, alternative


@pytest.mark.parametrize(
    "rule",
    [
        "key_known",
        "stop_strings_not_empty",
        "reward_term_names_unique",
        "python_reward_needs_opt_in",
        "lora_values_in_range",
    ],
)
def test_fix_of_an_odd_form_is_taken_by_the_composition_itself(rule):
    overrides, _ = CASES[rule]
    _, findings = check(compose(overrides).config)
    broken = next(finding for finding in findings if finding.rule == rule)
    composed = compose([*overrides, *read_first(broken.fix)])
    assert not composed.findings
    assert rule not in {finding.rule for finding in check(composed.config)[1]}


@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        ("tensor_parallel_divides_devices", [*VLLM, "rollout.devices=[]", "rollout.tensor_parallel_size=8"]),
        ("truncate_needs_high", [*VLLM, "loss.correction.mode=truncate", "loss.correction.low=2.0"]),
        ("value_type", ["data.name=jsonl", "data.train_size=a"]),
        ("counts_in_range", ["trainer.micro_batch_tokens=0", "data.max_prompt_tokens=2048"]),
    ],
)
def test_a_fix_holds_also_beside_another_mistake(rule, overrides):
    config = config_of(overrides)
    _, before = check(config)
    broken = next(finding for finding in before if finding.rule == rule)
    _, after = check(with_values(config, read_first(broken.fix)))
    errors = [{finding.rule for finding in found if finding.severity == "error"} for found in (before, after)]
    assert errors[1] <= errors[0] - {rule}


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "loss=gspo",
            "trainer.nproc_per_node=64",
        ],  # two updates of 32 sequences feed 32 processes
        ["loss=sapo", "trainer.prompts_per_step=3", "rollout.num_generations=3"],  # nine sequences have no halves
    ],
)
def test_no_two_fixes_undo_each_other(overrides):
    config = config_of(overrides)
    for _ in range(3):
        _, findings = check(config)
        if not findings:
            return
        config = with_values(config, read_first(findings[0].fix))
    pytest.fail(str(findings))


def test_plain_config_has_no_finding():
    config, findings = check(config_of([]))
    assert findings == []
    assert config is not None
    assert config.loss.name == "ppo_clip"


def test_ids_severities_and_order_are_those_of_the_list():
    listed = (Path(__file__).parent / "data" / "rules.txt").read_text(encoding="utf-8").splitlines()
    assert [f"{entry.severity} {rule}" for rule, entry in RULES.items() if entry.topic != "beyond"] == listed


def test_every_rule_that_the_sources_name_is_in_the_list():
    named = set()
    for file in (Path(__file__).parents[1] / "src").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        named |= set(re.findall(r'(?:Finding|Bad|report\.add|blame)\(\s*(?:rule=)?"(\w+)"', text))
    assert named - set(RULES) == set()
    assert {rule for rule, entry in RULES.items() if entry.topic == "beyond" and entry.find is None} <= named


@pytest.mark.skipif(not PAGE.exists(), reason="the page of rules is not beside this checkout")
def test_the_list_is_that_of_the_page():
    rows = re.findall(r"^\| `(\w+)` \| (error|warning) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed = (Path(__file__).parent / "data" / "rules.txt").read_text(encoding="utf-8").splitlines()
    assert list(dict.fromkeys(f"{severity} {rule}" for rule, severity in rows)) == listed
