"""Field cases (shared/cases.md) that the config or the start of a run decides: what is refused, and in which words."""

from __future__ import annotations

import json
import time

import pytest
from check_helpers import GROUPS, config_of
from omegaconf import OmegaConf

from grpo_cli.checks import check, start
from grpo_cli.checks.overrides import read_first
from grpo_cli.compose import load
from grpo_cli.options import conf_dir
from grpo_cli.plan import derive

NOWHERE = "model.path=./nothing-here"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory, and no W&B key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def findings(*overrides: str, severity: str = "error"):
    return [finding for finding in check(config_of(overrides))[1] if finding.severity == severity]


def errors(*overrides: str) -> list[str]:
    return [finding.rule for finding in findings(*overrides)]


# A09, E02: one completion a prompt


@pytest.mark.parametrize("filter_", GROUPS.options["filter"])
@pytest.mark.parametrize("advantage", GROUPS.options["advantage"])
def test_a09_one_completion_is_refused_by_whatever_compares_inside_a_group(advantage, filter_):
    choice = [f"advantage={advantage}", f"filter={filter_}", "rollout.num_generations=1"]
    found = {finding.rule: finding for finding in check(config_of(choice))[1] if finding.severity == "error"}
    expected = set()
    if advantage != "reinforce_pp":
        expected.add("group_advantage_needs_two_generations")
    if filter_ != "none":
        expected.add("group_filter_needs_two_generations")
    assert set(found) == expected
    for finding in found.values():
        assert "needs rollout.num_generations >= 2" in finding.message
        assert "rollout.num_generations" in finding.keys


def test_a09_is_told_without_the_model_and_at_once():
    began = time.perf_counter()
    found = [finding.rule for finding in load(["rollout.num_generations=1", NOWHERE], "validate").findings]
    assert "group_advantage_needs_two_generations" in found
    assert time.perf_counter() - began < 5


def test_e02_names_both_keys():
    [finding] = findings("rollout.num_generations=1", "filter=dynamic_sampling", "advantage=reinforce_pp")
    assert finding.keys == ("filter.name", "rollout.num_generations")


# A10: divisibility


def test_a10_more_updates_than_sequences():
    asked = ("trainer.prompts_per_step=1", "rollout.num_generations=2", "trainer.updates_per_step=4")
    [finding] = findings(*asked)
    assert finding.rule == "updates_have_sequences"
    assert "2 sequences a step (trainer.prompts_per_step=1 x rollout.num_generations=2)" in finding.message
    assert "at most 2 works" in finding.message
    assert errors(*asked, *read_first(finding.fix)) == []


def test_a10_uneven_splits_run():
    asked = ("trainer.prompts_per_step=3", "trainer.updates_per_step=2", "trainer.nproc_per_node=2")
    assert errors(*asked, "rollout.num_generations=3") == []
    [split, spread] = findings(*asked, "rollout.num_generations=3", severity="warning")
    assert split.message == (
        "9 sequences a step (trainer.prompts_per_step=3 x rollout.num_generations=3) do not divide into "
        "trainer.updates_per_step=2; 1 would."
    )
    assert spread.fix == "trainer.prompts_per_step=4"


# A16: the ramp of the overlong penalty


@pytest.mark.parametrize(("buffer", "expected"), [(1, []), (100, []), (0, 1), (120, 1), (-1, 1)])
def test_a16_the_ramp_lies_within_the_length(buffer, expected):
    overlong = f"reward.overlong={{max_tokens:100,buffer_tokens:{buffer},penalty:1.0}}"
    assert errors(overlong, "rollout.max_new_tokens=100") == (["overlong_buffer_within_max"] if expected else [])
    assert errors("reward.overlong=null") == []


# D02: KL in the reward

KL = ("loss.use_kl_in_reward=true", "loss.kl_coef=0.1", "loss.kl_estimator=k1", "filter=none")


def test_d02_kl_in_the_reward():
    reinforce = (*KL, "advantage=reinforce_pp")
    assert errors(*reinforce) == []
    passes = derive(check(config_of(reinforce))[0])["passes"]
    assert (passes["old"]["runs"], passes["reference"]["runs"]) == (True, True)
    forced = (*reinforce, "loss.force_on_policy_ratio=true")
    [finding] = findings(*forced)
    assert finding.rule == "kl_in_reward_needs_prev_logprobs"
    assert finding.keys == (
        "loss.force_on_policy_ratio",
        "loss.use_kl_in_reward",
        "loss.kl_coef",
        "loss.seq_logprob_error_threshold",
    )
    assert finding.message == (
        "KL in the reward (loss.kl_coef=0.1) needs logprobs of the old policy, but loss.force_on_policy_ratio=true "
        "skips that pass."
    )
    assert finding.fix == (
        "loss.force_on_policy_ratio=false, or loss.seq_logprob_error_threshold=2.0 (the pass then runs), or "
        "loss.kl_coef=0"
    )
    assert errors(*forced, "loss.kl_coef=0") == []
    assert errors(*forced, "loss.seq_logprob_error_threshold=2.0") == []
    assert errors(*KL, "advantage=grpo") == ["kl_in_reward_needs_reinforce_pp"]
    assert not derive(check(config_of(["loss.kl_coef=0"]))[0])["passes"]["reference"]["runs"]


# D05: truncated sampling


@pytest.mark.parametrize("cut", ["rollout.top_p=0.8", "rollout.top_k=2", "rollout.min_p=0.1"])
def test_d05_truncated_sampling_is_refused_where_the_samplers_logprobs_are_read(cut):
    truncate = ("loss.correction.mode=truncate", "loss.correction.high=2.0")
    assert errors(cut, *truncate) == ["corrected_sampling_needs_full_support"]
    assert errors(cut, "loss.seq_logprob_error_threshold=2.0") == ["corrected_sampling_needs_full_support"]
    assert errors(cut) == []
    assert [f.rule for f in findings(cut, severity="warning")] == ["training_samples_full_support"]


# D06, F06: types


@pytest.mark.parametrize("override", ["model.dtype=float16", "model.dtype=fp16", "rollout.dtype=float16"])
def test_f06_other_types_are_refused_with_the_allowed_ones(override):
    [finding] = findings(override)
    assert finding.rule == "choice_known"
    assert "bfloat16, float32" in finding.message


def test_f06_foreign_switches_and_both_types():
    assert errors("+trainer.fp16=true") == ["key_known"]
    assert errors("model.dtype=bfloat16") == errors("model.dtype=float32") == []


def test_d06_auto_is_shown_as_what_it_means():
    derived = json.dumps(derive(load(["rollout.dtype=auto", "model.dtype=float32"], "validate").config))
    assert '"auto"' not in derived
    assert '"float32"' in derived


# D07: correction


@pytest.mark.parametrize("rollout", GROUPS.options["rollout"])
def test_d07_correction_needs_no_second_switch(rollout):
    on = (f"rollout={rollout}", "loss.correction.mode=truncate")
    assert errors(*on, "loss.correction.high=2.0") == []
    assert errors(*on, "loss.correction.high=null") == ["truncate_needs_high"]
    assert errors(*on, "loss.correction.high=nan") == ["numbers_finite"]
    for high in (0, -1):
        assert errors(*on, f"loss.correction.high={high}") == ["correction_bounds_around_one"]
    mask = (f"rollout={rollout}", "loss.correction.mode=mask", "loss.correction.low=3", "loss.correction.high=2")
    assert errors(*mask) == ["correction_low_below_high"]


# E01, E04: filters


@pytest.mark.parametrize("rounds", ["0", "-1", "null"])
def test_e01_there_is_no_unlimited_mode(rounds):
    assert errors("filter=dynamic_sampling", f"filter.max_rounds={rounds}") == ["dynamic_sampling_needs_max_rounds"]


def test_e04_no_default_lets_the_penalty_decide():
    for filter_ in GROUPS.options["filter"]:
        assert config_of([f"filter={filter_}"])["filter"]["metric"] == "unshaped"
    for file in (conf_dir() / "experiment").glob("*.yaml"):
        assert OmegaConf.load(file).get("filter", {}).get("metric", "unshaped") == "unshaped", file


# F01, F08: the batch triple and clipping


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "train_batch_size"])
def test_f01_foreign_keys_are_unknown_and_the_nearest_is_named(key):
    [finding] = findings(f"+trainer.{key}=4")
    assert finding.rule == "key_known"
    assert "nearest known key is trainer." in finding.message


@pytest.mark.parametrize(("norm", "expected"), [("0.01", []), ("null", []), ("0", 1), ("-1", 1)])
def test_f08_clipping_is_positive_or_off(norm, expected):
    assert errors(f"trainer.max_grad_norm={norm}") == (["max_grad_norm_positive"] if expected else [])


# G05, G07, G10: data


def rows(tmp_path, *lines: dict) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def at_start(*overrides: str):
    given = ["data=jsonl", "data.train=rows.jsonl", "model=tiny", "trainer.prompts_per_step=1"]
    return start.check_data(load([*given, *overrides], "train").require())


def test_g05_a_wrong_column_is_told_with_what_is_there_although_the_model_is_missing(tmp_path):
    rows(tmp_path, {"question": "2+2", "answer": "4"})
    data, model = at_start(NOWHERE)
    assert (data.rule, model.rule) == ("data_has_keys", "model_readable")
    for told in ("rows.jsonl:1", "no column prompt", "question, answer"):
        assert told in data.message


def test_h10_a_python_term_that_takes_the_answer_is_held_to_it(tmp_path):
    rows(tmp_path, {"prompt": "2+2", "answer": "4"}, {"prompt": "1+1", "answer": " "})
    (tmp_path / "terms.py").write_text("def judge(completions, answer): ...\ndef mild(completions, answer=None): ...\n")

    def found(function: str, *overrides: str):
        term = f"reward.terms=[{{name: python, weight: 1.0, path: terms.py, function: {function}}}]"
        return [(finding.rule, finding.fix.split(", or ")[0]) for finding in at_start(term, *overrides)]

    assert found("mild") == found("mild", "data.answer_key=null") == []
    [(rule, _)] = found("judge")
    assert rule == "gold_answers_present"
    assert found("judge", "data.answer_key=null") == [("answer_reward_needs_answer_key", "data.answer_key=answer")]


def test_g07_lengths():
    assert errors("data.on_long_prompt=truncate") == ["choice_known"]
    [finding] = findings("data.max_prompt_tokens=32", "rollout.max_new_tokens=64", "rollout.max_model_len=95")
    assert finding.rule == "sequence_fits_context"
    assert finding.fix == "rollout.max_model_len=96"


def test_g10_what_drops_everything_is_refused(tmp_path):
    rows(tmp_path, {"prompt": "two and two", "answer": "4"})
    assert [finding.rule for finding in at_start("data.answer_key=anwser")] == ["data_has_keys"]
    assert errors("+data.filter=level") == ["key_known"]
    [metric] = findings("filter.metric=exact")
    assert (metric.rule, metric.message) == (
        "filter_metric_known",
        "filter.metric=exact is none of unshaped, total, number.",
    )
    [none_left] = at_start("data.on_long_prompt=drop", "data.max_prompt_tokens=1")
    assert none_left.rule == "data_covers_one_step"
    assert "No row is left" in none_left.message


# I01, I10: misspelt keys, open values


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rolout.num_generations=2", "rollout.num_generations"),
        ("+rolout.num_generations=2", "rollout.num_generations"),
        ("filter=dynamc_sampling", "dynamic_sampling"),
        ("+trainer.lrr=1", "trainer.lr"),
        ("++trainer.lrr=1", "trainer.lr"),
        ("run.name='${oc.env:NOPE}'", "run.name"),
        ("run.name='${nokey.y}'", "run.name"),
        ("data.train=???", "data.train"),
    ],
)
def test_i01_i10_one_finding_names_the_key_or_the_nearest(override, told):
    [finding] = load([override], "validate").findings
    assert told in finding.message


# J01, L01: the key of W&B, code of others


def test_j01_online_needs_a_key(monkeypatch, tmp_path):
    [finding] = findings("logger.wandb.mode=online")
    assert finding.rule == "wandb_online_needs_key"
    assert finding.fix == "logger.wandb.mode=offline, or logger.wandb.mode=disabled"
    assert "WANDB_API_KEY" in finding.message
    assert errors("logger.wandb.mode=offline") == errors("logger.wandb.mode=disabled") == []
    assert errors("logger.wandb.mode=ofline") == ["choice_known"]
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password word\n")
    assert errors("logger.wandb.mode=online") == []
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert errors("logger.wandb.mode=online") == []


@pytest.mark.parametrize("url", ["http://me:word@gpu7.org:8000", "htp://me:word@gpu7", "me:word@gpu7:80"])
def test_no_finding_repeats_a_password(url):
    found = check(config_of(["rollout=vllm_server", "rollout.weight_sync=ipc", f'rollout.server_url="{url}"']))[1]
    assert "no_credentials_in_urls" in {finding.rule for finding in found}
    assert not [finding for finding in found if "word" in finding.line().replace("password", "")]


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("http://gpu7:99999", "rollout.server_url=null"),
        ("ftp://gpu7:80", "rollout.server_url=null"),
        ("https//gpu7", "rollout.server_url=null"),
        ("http:/gpu7", "rollout.server_url=null"),
        ("http://", "rollout.server_url=null"),
        ("http://a b", "rollout.server_url=null"),
        ("gpu7:8000", "rollout.server_url=http://gpu7:8000, or rollout.server_url=null"),
    ],
)
def test_an_address_is_completed_only_where_it_lacks_nothing_but_the_scheme(url, fix):
    [finding] = findings("rollout=vllm_server", f'rollout.server_url="{url}"')
    assert (finding.rule, finding.fix) == ("server_url_valid", fix)


# Values that nothing reads


@pytest.mark.parametrize("command", ["train", "eval"])
def test_files_and_columns_of_generated_data_are_refused(command):
    for override in ("data.train=x.jsonl", "data.eval=x.jsonl", "data.prompt_key=q", "data.answer_key=a"):
        for generated in ("data=arithmetic", "data=reasoning_gym"):
            [finding] = check(config_of([generated, override]), command)[1]
            assert (finding.rule, finding.severity) == ("file_keys_need_file_data", "error")
            key = override.partition("=")[0]
            assert finding.keys == (key, "data.name") or finding.keys == ("data.name", key)
    [finding] = findings("data.train=openai/gsm8k:main:train")
    assert finding.fix == "data=hf, or data.train=null"
    [finding] = findings("data.train=x.jsonl")
    assert finding.fix == "data=jsonl, or data.train=null"


@pytest.mark.parametrize(
    ("value", "reader"),
    [
        (["reward.workers=4"], ["reward=math"]),
        (["reward.timeout_s=5.0"], ["reward=math"]),
        (["rollout.max_model_len=4096"], ["rollout=vllm"]),
        (["filter=none", "filter.metric=number"], ["filter.name=zero_std"]),
        (["filter.surplus=carry"], ["filter.name=dynamic_sampling", "filter.max_rounds=3"]),
        (["advantage=rloo", "advantage.eps=1e-4"], ["advantage.name=passk"]),
        (["advantage.normalize=none", "advantage.eps=1e-4"], ["advantage.normalize=batch"]),
        (["loss.kl_estimator=k2"], ["loss.kl_coef=0.01"]),
        (["loss.correction.level=sequence"], ["loss.correction.mode=truncate", "loss.correction.high=2.0"]),
        (["trainer.rdzv_endpoint=gpu7:29500"], ["trainer.nnodes=2"]),
        (["trainer.resume=never", "trainer.allow_config_change=true"], ["trainer.resume=auto"]),
        (["logger.wandb.project=mine"], ["logger.wandb.mode=offline"]),
    ],
)
def test_a_value_that_nothing_reads_is_a_warning(value, reader):
    key = value[-1].partition("=")[0]
    [finding] = [f for f in findings(*value, severity="warning") if f.rule == "value_is_read"]
    assert finding.keys == (key,)
    assert errors(*value) == []
    assert "value_is_read" not in [f.rule for f in findings(*value, *reader, severity="warning")]


def test_l01_scripts_are_refused():
    assert errors("data=hf", "data.train=org/set.py") == ["dataset_script_refused"]
    assert errors("data=jsonl", "data.train=load.py") == ["dataset_script_refused"]
    assert [f.rule for f in findings("model.trust_remote_code=true", severity="warning")] == ["trust_remote_code_off"]


def test_engines_on_devices_of_their_own_are_on_one_node():
    """They listen on loopback of the first node; an engine inside each process needs no server, on any node."""
    devices = ["rollout=vllm", "rollout.devices=[1]", "rollout.weight_sync=disk", "rollout.sleep_level=0"]
    [finding] = [f for f in check(config_of([*devices, "trainer.nnodes=2"]))[1] if f.rule == "own_server_on_one_node"]
    assert finding.keys == ("rollout.devices", "trainer.nnodes")
    assert finding.fix.startswith("rollout.devices=null rollout.weight_sync=in_process")
    given = ["rollout=vllm_server", "rollout.server_url=http://node0:8000", "trainer.nnodes=2"]
    for words in (devices, given, ["rollout=vllm", "trainer.nnodes=2"]):
        assert "own_server_on_one_node" not in {f.rule for f in check(config_of(words))[1]}


# E: reward terms that come to one name


def python_terms(*terms: str) -> str:
    return "reward.terms=[" + ",".join(f"{{name:python,weight:1.0,{term}}}" for term in terms) + "]"


@pytest.mark.parametrize(
    ("terms", "name"),
    [
        (python_terms("path:x/a.py,function:f", "path:y/a.py,function:f"), "a.f"),
        (python_terms("path:a.py,function:f", "path:a.py,function:f"), "a.f"),
        ("reward.terms=[{name:python,weight:1.0,path:a.py,function:exact},{name:exact,weight:1.0}]", "exact"),
        (python_terms("path:a.py,function:total"), "total"),
        (python_terms("path:a.py,function:unshaped", "path:a.py,function:g"), "unshaped"),
    ],
)
def test_two_rewards_never_have_one_name(terms, name):
    (finding,) = findings(terms)
    assert finding.rule == "reward_term_names_unique"
    assert f"the name {name} " in finding.message
    assert errors(*read_first(finding.fix)) == []


def test_terms_that_are_told_apart_are_fine():
    assert errors(python_terms("path:a.py,function:f", "path:b.py,function:f", "path:a.py,function:g")) == []
