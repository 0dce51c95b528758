"""Composition: what is typed -> one resolved config, or every mistake at once, in the tool's own words."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.compose import compose
from grpo_cli.options import Groups, conf_dir, read_groups

GROUPS = read_groups([conf_dir()])


def rules(composed) -> list[tuple[str, str]]:
    """(rule, first key) of every finding."""
    return [(finding.rule, finding.keys[0]) for finding in composed.findings]


def test_the_default_config_composes_without_findings():
    composed = compose([], now=datetime(2026, 1, 2, 3, 4, 5))
    assert composed.findings == []
    assert composed.config["run"] == {"name": "grpo", "dir": "runs/grpo/2026-01-02_03-04-05", "seed": 0}
    assert composed.config["eval"]["max_new_tokens"] == composed.config["rollout"]["max_new_tokens"] == 256


@pytest.mark.parametrize("experiment", GROUPS.options["experiment"])
def test_every_experiment_composes_alike_in_both_forms(experiment):
    now = datetime(2026, 1, 1)
    plain, plus = compose([f"experiment={experiment}"], now=now), compose([f"+experiment={experiment}"], now=now)
    assert plain.findings == plus.findings == []
    assert plain.config == plus.config
    assert plain.overrides == [f"+experiment={experiment}"]


def test_overrides_beat_the_experiment_wherever_they_stand():
    composed = compose(["trainer.lr=0.5", "+experiment=smoke", "loss=gspo"])
    assert composed.config["trainer"]["lr"] == 0.5
    assert composed.config["loss"]["name"] == "gspo"


def test_every_option_of_every_base_group_composes():
    for turn in range(max(len(GROUPS.options[group]) for group in GROUPS.defaults)):
        chosen = {group: GROUPS.options[group][turn % len(GROUPS.options[group])] for group in GROUPS.defaults}
        composed = compose([f"{group}={option}" for group, option in chosen.items()])
        assert composed.findings == [], chosen
        for group, option in chosen.items():
            assert composed.config[group].get("name", option) == (option if group != "run" else "grpo")


@pytest.mark.parametrize(
    ("override", "rule", "key", "fix"),
    [
        ("filter=dynamc_sampling", "option_known", "filter", "filter=dynamic_sampling"),
        ("+experiment=smke", "option_known", "experiment", "experiment=smoke"),
        ("~filter", "group_present", "filter", "filter=none"),
        ("filter=null", "group_present", "filter", "filter=none"),
        ("~loss", "group_present", "loss", "loss=ppo_clip"),
        ("loss=[gspo,dapo]", "config_composes", "loss", "loss=gspo"),
        ("loss@trainer=gspo", "config_composes", "loss", "loss=gspo"),
        ("~trainer.lrr", "key_known", "trainer.lrr", "remove ~trainer.lrr"),
        ("hydra.run.dir=x", "key_known", "hydra.run.dir", "run.dir=x"),
        ("smoke", "override_parses", "smoke", "experiment=smoke"),
        ("run.name=${oc.env:GRPO_NOPE}", "interpolation_resolves", "run.name", "run.name=grpo"),
        ("run.name=${nokey.y}", "interpolation_resolves", "run.name", "run.name=grpo"),
        ("run.name=${run.name}", "interpolation_resolves", "run.name", "run.name=grpo"),
        ("rollout.num_generations=2,4", "override_parses", "rollout.num_generations", "-m rollout.num_generations=2,4"),
        ("loss=gspo,", "override_parses", "loss", "loss=gspo"),
        ("loss=gspo,,dapo,", "override_parses", "loss", "-m loss=gspo,dapo"),
        ("trainer.lr=1e-3,", "override_parses", "trainer.lr", "trainer.lr=1e-3"),
    ],
)
def test_a_mistake_has_its_rule_key_and_fix(override, rule, key, fix):
    composed = compose([override])
    assert rules(composed) == [(rule, key)]
    first = composed.findings[0].fix.split(", or ")[0]
    assert first == fix
    if not fix.startswith(("-m", "remove ")):
        assert compose([first]).findings == []


def test_all_mistakes_are_found_at_once():
    composed = compose(["filter=dynamc_sampling", "loss=gpso", "run.dir=runs/epoch=3", "run.name=${no.such}"])
    assert rules(composed) == [
        ("option_known", "filter"),
        ("option_known", "loss"),
        ("override_parses", "run.dir"),
        ("interpolation_resolves", "run.name"),
    ]


def test_unknown_keys_are_left_for_the_schema_with_and_without_plus():
    for override in ("rolout.num_generations=2", "+rolout.num_generations=2", "++rolout.num_generations=2"):
        assert compose([override]).config["rolout"] == {"num_generations": 2}


@pytest.mark.parametrize(
    "value", ["runs/epoch=3", "a#b.jsonl", "~/x.jsonl", "データ.jsonl", "\\boxed{1}", 'a"b;c', "\\\\#\\"]
)
def test_special_characters_need_quotes_and_the_message_shows_them(value):
    bare = compose([f"data.train={value}"])
    assert rules(bare) == [("override_parses", "data.train")]
    quoted = shlex.split(bare.findings[0].fix)
    assert quoted[0] in bare.findings[0].message
    assert compose(quoted).config["data"]["train"] == value


def test_characters_that_work_bare():
    assert compose(["data.train=a|b%c@d"]).config["data"]["train"] == "a|b%c@d"


@pytest.mark.parametrize(
    ("bare", "expected"),
    [
        ("rollout.stop=[\\boxed{1}, #]", ["\\boxed{1}", "#"]),
        ("rollout.stop=[a, ]", ["a"]),
        (
            "reward.terms=[{name: regex, weight: 1.0, pattern: (\\d+)}, {name: exact, weight: 0.5}]",
            [{"name": "regex", "weight": 1.0, "pattern": "(\\d+)"}, {"name": "exact", "weight": 0.5}],
        ),
    ],
)
def test_in_lists_and_groups_of_keys_only_what_needs_quotes_gets_them(bare, expected):
    section, _, key = bare.partition("=")[0].partition(".")
    [finding] = compose([bare]).findings
    assert compose(shlex.split(finding.fix)).config[section][key] == expected


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        (
            "data.system_prompt=A number, please",
            "'data.system_prompt=\"A number, please\"', or -m 'data.system_prompt=A number, please'",
        ),
        ("model.path=a,b", "-m model.path=a,b, or 'model.path=\"a,b\"'"),
        ("rollout.stop=a,b", "-m rollout.stop=a,b, or 'rollout.stop=[a,b]'"),
        ("trainer.lr=1,2", "-m trainer.lr=1,2"),
    ],
)
def test_values_with_a_comma_are_a_sweep_a_list_or_a_text_as_the_key_takes_them(override, fix):
    assert [finding.fix for finding in compose([override]).findings] == [fix]


@pytest.mark.parametrize("pair", [["experiment=smoke", "+experiment=grpo"], ["+experiment=smoke", "+experiment=smoke"]])
def test_two_experiments_are_one_too_many(pair):
    composed = compose(pair)
    assert rules(composed) == [("config_composes", "experiment")]
    assert "one experiment only" in composed.findings[0].message


def test_an_interpolation_of_a_deleted_key_is_no_second_mistake():
    composed = compose(["~rollout.max_new_tokens"])
    assert composed.findings == []
    assert "max_new_tokens" not in composed.config["rollout"]


def _user_dir(tmp_path: Path, text: str, name: str = "mine") -> Path:
    (tmp_path / "experiment").mkdir(exist_ok=True)
    (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    return tmp_path


def test_a_users_own_experiment(tmp_path):
    good = "# @package _global_\ndefaults:\n  - override /loss: gspo\ntrainer:\n  lr: 0.25\n"
    composed = compose(["experiment=mine"], _user_dir(tmp_path, good))
    assert composed.findings == []
    assert (composed.config["loss"]["name"], composed.config["trainer"]["lr"]) == ("gspo", 0.25)


def test_a_folder_named_like_an_option_is_none(tmp_path):
    (tmp_path / "loss" / "d.yaml").mkdir(parents=True)
    assert read_groups([conf_dir(), tmp_path]) == GROUPS


def test_what_was_composed_before_changes_nothing(tmp_path):
    text = "# @package _global_\ntrainer:\n  lr: 0.25\n"
    folder = _user_dir(tmp_path, text)
    assert compose(["experiment=mine", "~trainer.lr", "trainer.seed=1"], folder).config["trainer"].get("lr") is None
    assert compose(["experiment=mine"], folder).config["trainer"]["lr"] == 0.25
    _user_dir(tmp_path, text.replace("0.25", "0.75"))
    assert compose(["experiment=mine"], folder).config["trainer"]["lr"] == 0.75


@pytest.mark.parametrize(
    ("text", "rule", "said"),
    [
        ("# @package _global_\ndefaults:\n  - /loss: gspo\n", "config_composes", "override /loss: gspo"),
        ("# @package _global_\ndefaults:\n  - loss: gspo\n", "config_composes", "override /loss: gspo"),
        ("defaults:\n  - override /loss: gspo\ntrainer:\n  lr: 0.25\n", "config_composes", "# @package _global_"),
        ("# @package _global_\ndefaults:\n  - override /loss: gpso\n", "option_known", "gspo"),
        ("# @package _global_\ndefaults:\n  - override /los: gspo\n", "config_composes", "los"),
        ("# @package _global_\ntrainer: {lr: 1\n", "config_composes", "mine.yaml"),
    ],
)
def test_a_users_experiment_written_slightly_wrong(tmp_path, text, rule, said):
    composed = compose(["+experiment=mine"], _user_dir(tmp_path, text))
    assert [finding.rule for finding in composed.findings] == [rule]
    assert said in composed.findings[0].fix + composed.findings[0].message
    assert "mine.yaml" in composed.findings[0].fix
    assert "\n" not in composed.findings[0].line()


def test_a_users_directory_that_cannot_be_used(tmp_path):
    assert rules(compose([], tmp_path / "nowhere")) == [("config_composes", "--config-dir")]
    assert rules(compose([], _user_dir(tmp_path, "", "smoke"))) == [("config_composes", "--config-dir")]


def test_no_state_of_hydra_is_left_behind_or_needed():
    compose([])
    assert not GlobalHydra().is_initialized()


def test_optional_groups_are_those_without_a_default():
    assert "experiment" in GROUPS.optional
    assert Groups({"loss": ("a",), "scale": ("b",)}, {"loss": "a"}).optional == ("scale",)


KEYS = [
    "trainer.lr",
    "loss",
    "loss.correction",
    "reward.terms",
    "reward.terms.0.weight",
    "run.name",
    "experiment",
    "x.y",
    "",
]
VALUES = [
    "1",
    "nan",
    "null",
    "[]",
    "{a: {b: 2}}",
    "1,2",
    "${run}",
    "${run.name}",
    '"${"',
    "${oc.decode:'{'}",
    "a#b",
    "~x",
    "",
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "+", "++", "~"]),
            st.sampled_from(KEYS) | st.text(max_size=4),
            st.sampled_from(["=", ""]),
            st.sampled_from(VALUES) | st.text(max_size=6),
        ).map("".join),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_is_typed_there_is_a_config_or_a_finding(overrides):
    composed = compose(overrides)
    assert composed.config is not None or composed.findings
    assert all(finding.rule and finding.keys and finding.message and finding.fix for finding in composed.findings)
