"""What each command refuses, and what nothing may cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from check_cases import CASES, JSONL, SERVER, VLLM, overlong
from check_helpers import GROUPS, config_of

from grpo_cli.checks import RULES, check, in_order
from grpo_cli.compose import compose
from grpo_cli.errors import Finding

MISTAKES = ["rollout.temperature=0", "rollout.top_p=0.9", "trainer.lr=0", "loss.clip_low=-1", "model.path=''"]


def rules(config, command, terms=None, severity=None):
    findings = check(config, command, terms)[1]
    return [finding.rule for finding in findings if severity in (None, finding.severity)]


@pytest.mark.parametrize("command", ["train", "validate", "plan"])
def test_commands_that_start_a_run_check_everything(command):
    assert rules(config_of(MISTAKES), command) == [
        "temperature_positive",
        "training_samples_full_support",
        "clip_not_negative",
        "lr_positive",
        "model_path_given",
    ]


def test_eval_checks_what_it_reads():
    assert rules(config_of(MISTAKES), "eval") == ["model_path_given", "value_is_read"]  # rollout.top_p
    assert rules(config_of(MISTAKES), "eval", severity="error") == ["model_path_given"]
    ranges = config_of(["rollout.temperature=0.001", "rollout.top_p=2", "rollout.max_model_len=8"])
    assert rules(ranges, "eval", severity="error") == [
        "temperature_positive",
        "sampling_filters_in_range",
        "sequence_fits_context",
    ]
    assert rules(config_of(["eval.temperature=-1", "eval.top_p=0"]), "eval") == [
        "temperature_positive",
        "sampling_filters_in_range",
    ]


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["rollout.temperature=0.7"], "eval.temperature=0.7, or rollout.temperature=1.0"),
        (["rollout.temperature=0.7", "eval.temperature=0.5"], "rollout.temperature=1.0"),
        (["rollout.top_p=0.9"], "eval.top_p=0.9, or rollout.top_p=1.0"),
        (["rollout.top_k=2"], "rollout.top_k=null"),
        (["rollout.min_p=0.1"], "rollout.min_p=null"),
    ],
)
def test_eval_tells_of_sampling_that_it_does_not_read(overrides, fix):
    (finding,) = check(config_of(overrides), "eval")[1]
    assert (finding.rule, finding.severity, finding.keys) == (
        "value_is_read",
        "warning",
        (overrides[0].partition("=")[0],),
    )
    assert finding.fix == fix
    for alternative in fix.split(", or "):
        assert check(config_of([*overrides, alternative]), "eval")[1] == []


@pytest.mark.parametrize("same", [["rollout.temperature=0"], ["rollout.temperature=0.7", "eval.temperature=0.7"]])
def test_eval_says_nothing_of_sampling_that_is_its_own(same):
    assert check(config_of(same), "eval")[1] == []


def test_what_evaluation_samples_must_fit_too():
    """64 tokens of prompt: 36 are left of 100."""
    engine = ["rollout=vllm", "rollout.max_new_tokens=16", "rollout.max_model_len=100", "eval.max_new_tokens=200"]
    assert rules(config_of(engine), "train") == []
    for command, more in (("train", ["trainer.eval_every=1"]), ("eval", [])):
        (finding,) = check(config_of([*engine, *more]), command)[1]
        assert finding.rule == "sequence_fits_context"
        assert finding.fix == "rollout.max_model_len=264, or eval.max_new_tokens=36"


REPLAY_REFUSES = {
    "filter_metric_known",
    "clip_range_needs_both_bounds",
    "cispo_needs_clip_high",
    "constant_aggregation_needs_length",
    "truncate_needs_high",
    "advantage_eps_positive",
    "advantage_clip_positive",
    "sapo_taus_positive",
    "overlong_buffer_within_max",
    "kl_in_reward_needs_prev_logprobs",
    "no_callables_in_config",
}


@pytest.mark.parametrize("rule", [rule for rule in CASES if RULES[rule].topic != "shape"])
def test_replay_refuses_only_what_leaves_a_number_undefined(rule):
    refused = rules(config_of(CASES[rule][0]), "replay", ["number"], "error")
    assert (rule in refused) == (rule in REPLAY_REFUSES)


def test_replay_takes_the_terms_of_the_dump():
    config = config_of(["filter.metric=quality", "reward.terms=[{name:nowhere.term,weight:1.0}]"])
    assert rules(config, "replay", ["quality", "length"]) == []
    assert rules(config, "replay", ["exact"]) == ["filter_metric_known"]
    weighted = config_of(["advantage=maxrl", "replay.weights={length:-0.5}"])
    assert rules(weighted, "replay", ["quality", "length"]) == ["maxrl_needs_non_negative_rewards"]
    assert rules(weighted, "replay", ["quality"]) == []


def test_replay_needs_no_model_data_or_term():
    for reward in ("python", "regex"):
        config, findings = check(config_of(["model=hf", "data=jsonl", f"reward={reward}"]), "replay", ["exact"])
        assert config is not None
        assert findings == []


def test_a_weight_of_the_dump_is_named_by_its_own_key():
    none = config_of(["replay.weights={exact:0.0}"])
    (finding,) = check(none, "replay", ["exact"])[1]
    assert (finding.keys, finding.fix) == (("replay.weights",), "replay.weights.exact=1.0")
    assert "replay.weights.exact=0.0" in finding.message
    assert rules(config_of([]), "replay", []) == []  # a file whose terms could score nothing: no term can be added


@pytest.mark.parametrize(
    "value", ["model.path=null", "run.name=null", "model.path='???'", "reward.terms=[{name:of.mine,weight:1.0}]"]
)
def test_what_a_replay_does_not_read_refuses_nothing(value):
    typed, findings = check(config_of([value]), "replay", ["exact"])
    assert typed is not None
    assert [finding for finding in findings if finding.severity == "error"] == []
    assert check(config_of([value]), "train")[0] is None or value == "model.path='???'"


def test_replay_refuses_shape():
    assert rules(config_of(["loss.clip_low=low", "+loss.clip=1"]), "replay", ["exact"], "error") == [
        "key_known",
        "value_type",
    ]


def test_findings_of_several_sources_are_put_in_the_order_of_the_list():
    late, early = (Finding(rule, (), "", "") for rule in ("run_dir_writable", "data_covers_one_step"))
    assert in_order([late, early]) == [early, late]


def options():
    return [(group, option) for group in GROUPS.defaults for option in GROUPS.options[group]]


@pytest.mark.parametrize(("group", "option"), options(), ids="/".join)
def test_every_option_of_every_group_is_valid_once_its_open_values_are_given(group, option):
    given = {
        "data=jsonl": ["data.train=a.jsonl"],
        "data=hf": ["data.train=org/set"],
        "model=hf": ["model.path=org/model"],
        "reward=python": ["reward.terms.0.path=a.py", "reward.terms.0.function=f"],
        "reward=regex": ["reward.terms.0.pattern='[0-9]'"],
    }
    choice = f"{group}={option}"
    typed, findings = check(config_of([choice, *given.get(choice, [])]))
    assert typed is not None
    assert [finding for finding in findings if finding.severity == "error"] == []


@pytest.mark.parametrize("experiment", GROUPS.options["experiment"])
def test_every_shipped_experiment_is_valid(experiment):
    scales = [[], *([f"+{group}={option}"] for group in GROUPS.optional if group != "experiment"
                    for option in GROUPS.options[group])]  # fmt: skip
    for scale in scales:
        composed = compose([f"+experiment={experiment}", *scale])
        assert composed.findings == []
        findings = check(composed.config)[1]
        open_values = {finding.keys[0] for finding in findings if finding.rule == "value_given"}
        assert open_values <= {"model.path", "data.train"}
        assert [f for f in findings if f.severity == "error" and f.rule != "value_given"] == []


def test_checks_take_milliseconds():
    """A config without mistakes: well under the 50 ms that `grpo validate` gives them."""
    config = config_of([*JSONL, *VLLM, overlong()])
    check(config)
    start = time.perf_counter()
    for _ in range(10):
        check(config)
    assert (time.perf_counter() - start) / 10 < 0.05


def test_checks_import_nothing_heavy():
    code = (
        "import sys, grpo_cli.checks; "
        "print(sorted({'torch','deepspeed','transformers','vllm','wandb','hydra'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "[]\n"


def test_a_server_config_is_valid():
    stale = ["rollout.max_staleness=1", "loss.correction.mode=truncate", "loss.correction.high=2.0"]
    assert rules(config_of([*SERVER, *stale]), "train") == []
