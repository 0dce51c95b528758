"""Shape: typed, complete, known and finite, each mistake once, with the value that mends it."""

from __future__ import annotations

import pytest
from check_helpers import config_of, with_values

from grpo_cli.checks import check
from grpo_cli.checks.overrides import apply, read_first


def found(*overrides: str) -> list[tuple[str, str]]:
    """Rule and first key of every finding."""
    return [(finding.rule, finding.keys[0]) for finding in check(config_of(overrides))[1]]


def fix(*overrides: str) -> str:
    _, findings = check(config_of(overrides))
    assert len(findings) == 1, findings
    return findings[0].fix


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("trainer.lr=abc", "value_type"),
        ("trainer.lr=true", "value_type"),
        ("trainer.lr=null", "value_type"),
        ("trainer.lr=[1e-6]", "value_type"),
        ("rollout.num_generations=true", "value_type"),
        ("rollout.num_generations=2.5", "value_type"),
        ("rollout.num_generations='4'", "value_type"),
        ("trainer.save_every=None", "value_type"),
        ("data.shuffle=1", "value_type"),
        ("run.name=2024", "value_type"),
        ("run.name=None", "value_type"),
        ("model.path=None", "value_type"),
        ("trainer.betas=0.9", "value_type"),
        ("trainer.betas=[0.9,high]", "value_type"),
        ("loss.correction=none", "value_type"),
        ("model.lora=true", "value_type"),
        ("replay.weights={exact:high}", "value_type"),
        ("logger.wandb.mode=ofline", "choice_known"),
        ("model.dtype=float16", "choice_known"),
        ("model.dtype=fp16", "choice_known"),
        ("rollout.dtype=float16", "choice_known"),
        ("data.on_long_prompt=truncate", "choice_known"),
        ("trainer.zero_stage=4", "choice_known"),
        ("trainer.zero_stage=true", "value_type"),
        ("trainer.zero_stage=2.0", "value_type"),
        ("loss.name=ppo", "choice_known"),
        ("rollout.name=sglang", "choice_known"),
        ("data.name=parquet", "choice_known"),
        ("trainer.lr=inf", "numbers_finite"),
        ("loss.kl_coef=nan", "numbers_finite"),
        ("reward.terms.0.weight=-1e200", "numbers_finite"),
        ("trainer.steps=1" + "0" * 400, "numbers_finite"),
        ("trainer.updates_per_step=0", "counts_in_range"),
        ("run.seed=-1", "counts_in_range"),
        ("run.seed=9223372036854775808", "counts_in_range"),  # 2**63
        ("eval.samples=0", "counts_in_range"),
        ("eval.k=[0]", "counts_in_range"),
        ("eval.k=[1,4]", "counts_in_range"),
        ("data.max_operand=0", "counts_in_range"),
        ("data.max_operand=5", "counts_in_range"),
        ("+trainer.fp16=true", "key_known"),
        ("+trainer.train_batch_size=16", "key_known"),
        ("+loss.correction.cap=2", "key_known"),
        ("+data.filter=level", "key_known"),
        ("+rolout.num_generations=2", "key_known"),
        ("++lr=1", "key_known"),
        ("trainer.rdzv_endpoint='???'", "value_given"),
    ],
)
def test_one_mistake_is_one_finding_at_its_key_with_a_fix_that_holds(override, rule):
    config = config_of([override])
    typed, findings = check(config)
    assert typed is None
    assert [(finding.rule, finding.severity) for finding in findings] == [(rule, "error")]
    key = override.lstrip("+").partition("=")[0]
    assert findings[0].keys[0].startswith(key)
    mended, after = check(with_values(config, read_first(findings[0].fix)))
    assert mended is not None
    assert [finding for finding in after if finding.severity == "error"] == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.num_generations='4'", "rollout.num_generations=4, or rollout.num_generations=8"),
        ("rollout.num_generations=2.5", "rollout.num_generations=2, or rollout.num_generations=8"),
        ("trainer.eval_every=None", "trainer.eval_every=null"),
        ("run.name=2024", "'run.name=\"2024\"', or run.name=grpo"),
        ("data.shuffle='no'", "data.shuffle=false, or data.shuffle=true"),
        ("trainer.lr=abc", "trainer.lr=1e-6"),
        ("trainer.zero_stage=true", "trainer.zero_stage=1, or trainer.zero_stage=2"),
        ("logger.console=rch", "logger.console=rich, or logger.console=auto, or logger.console=plain"),
        ("logger.wandb.mode=ofline", "logger.wandb.mode=offline, or logger.wandb.mode=disabled"),
        (
            "+trainer.lrr=1e-5",
            "~trainer.lrr trainer.lr=1e-5 (behind it; in its place without ~trainer.lrr), or ~trainer.lrr",
        ),
        (
            "+rolout.num_generations=2",
            "~rolout rollout.num_generations=2 (behind it; in its place without ~rolout), or ~rolout",
        ),
        (
            "+trainer.seed=3",
            "~trainer.seed run.seed=3 (behind it; in its place without ~trainer.seed), or ~trainer.seed",
        ),
        ("+trainer.gradient_accumulation_steps=4", "~trainer.gradient_accumulation_steps"),
        ("+rollout.sleep_level=1", "~rollout.sleep_level, or rollout=vllm (in place of rollout=hf)"),
        (
            "reward.terms=exact",
            "'reward.terms=[{name:exact,weight:1.0}]', or 'reward.terms=[{name:number,weight:1.0}]'",
        ),
        ("rollout.name=vllm", "rollout=vllm, or rollout.name=hf"),
        ("data.name=jsonl", "data=jsonl data.train=train.jsonl, or data.name=arithmetic"),
        ("data.name=reasoning_gym", "data=reasoning_gym, or data.name=arithmetic"),
    ],
)
def test_fix_says_what_was_probably_meant(override, expected):
    assert fix(override) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout=vllm", "rollout.name=hf"], "rollout=hf, or rollout.name=vllm"),
        (["rollout=vllm", "rollout.name=vllm_server"], "rollout=vllm_server, or rollout.name=vllm"),
        (["data=jsonl", "data.train=x", "data.name=arithmetic"], "data=arithmetic data.train=null, or data.name=jsonl"),
        (
            ["rollout=vllm", "+rollout.server_url=http://gpu7:8000"],
            "~rollout.server_url, or rollout=vllm_server (in place of rollout=vllm)",
        ),
    ],
)
def test_the_name_or_a_key_of_another_option_is_mended_by_choosing_it(overrides, expected):
    assert fix(*overrides) == expected


def test_an_option_as_a_fix_keeps_what_was_asked_for():
    config = config_of(["data=jsonl", "data.train=x.jsonl", "data.shuffle=false", "data.name=arithmetic"])
    changed = apply(config, {"data": "arithmetic"})["data"]
    assert (changed["shuffle"], changed["train"], changed["max_prompt_tokens"]) == (False, "x.jsonl", 64)


def test_parts_of_the_overlong_penalty_fit_what_is_given():
    config = config_of(["reward.overlong={max_tokens:3}"])
    _, findings = check(config)
    assert [finding.fix for finding in findings] == ["reward.overlong.buffer_tokens=1", "reward.overlong.penalty=1.0"]


def test_message_of_an_unknown_key_names_the_nearest_or_the_option_that_has_it():
    _, [unknown] = check(config_of(["+trainer.gradient_accumulation_steps=4"]))
    assert "the nearest known key is trainer." in unknown.message
    _, [elsewhere] = check(config_of(["+rollout.sleep_level=1"]))
    assert elsewhere.message == "rollout.sleep_level is a key of rollout=vllm, not of rollout=hf."


def test_all_mistakes_are_listed_in_the_order_of_the_rules():
    assert found("loss.kl_coef=nan", "+trainer.lrr=1", "rollout.top_p=2", "model.dtype=half", "trainer.steps=0") == [
        ("key_known", "trainer.lrr"),
        ("choice_known", "model.dtype"),
        ("numbers_finite", "loss.kl_coef"),
        ("counts_in_range", "trainer.steps"),
        ("sampling_filters_in_range", "rollout.top_p"),
    ]


def test_a_rule_that_reads_a_key_of_wrong_shape_is_not_run():
    assert found("rollout.num_generations=true", "filter.metric=total") == [("value_type", "rollout.num_generations")]
    assert found("rollout.name=vlm", "rollout.temperature=cold", "trainer.lr=0") == [
        ("value_type", "rollout.temperature"),
        ("choice_known", "rollout.name"),
        ("lr_positive", "trainer.lr"),
    ]


def test_an_open_value_of_a_python_term_hides_no_other_finding():
    assert found("reward=python", "filter.metric=nothing", "trainer.lr=0") == [
        ("value_given", "reward.terms.0.path"),
        ("value_given", "reward.terms.0.function"),
        ("lr_positive", "trainer.lr"),
    ]


def test_reward_terms_are_typed_by_their_name():
    terms = "reward.terms=[{name:regex,weight:1.0},{weight:1.0},{name:7,weight:1.0},{name:exact,wait:2},plain]"
    assert found(terms) == [
        ("key_known", "reward.terms.3.wait"),
        ("value_given", "reward.terms.1.name"),
        ("value_given", "reward.terms.0.pattern"),
        ("value_given", "reward.terms.3.weight"),
        ("value_type", "reward.terms.2.name"),
        ("value_type", "reward.terms.4"),
    ]


def test_null_of_a_key_with_a_rule_of_its_own_is_told_by_that_rule():
    assert found("run.name=null", "model.path=null", "reward.timeout_s=null") == [
        ("reward_needs_a_time_limit", "reward.timeout_s"),
        ("model_path_given", "model.path"),
        ("run_name_is_one_component", "run.name"),
    ]


@pytest.mark.parametrize("nothing", [{}, {"loss": None}, {"loss": 3}, {"loss": []}, {1: 2}])
def test_what_is_no_config_at_all_is_told_and_never_crashes(nothing):
    typed, findings = check(nothing)
    assert typed is None
    assert "group_present" in {finding.rule for finding in findings}


def test_wrong_name_of_a_group_is_mended_with_the_keys_that_the_other_option_has():
    config = config_of(["rollout.name=vlm"])
    _, [finding] = check(config)
    mended = with_values(config, read_first(finding.fix))
    assert mended["rollout"]["name"] == "vllm"
    assert finding.fix.startswith("rollout.name=vllm rollout=vllm, or ")
    assert mended["rollout"]["gpu_memory_utilization"] == 0.4
    assert check(mended)[1] == []


def test_the_config_is_not_changed():
    config = config_of(["reward.terms=[{name:what,weight:1.0}]", "++model._target_=x", "rollout.name=vlm"])
    before = apply(config, {})
    check(config)
    assert config == before
