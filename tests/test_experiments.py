"""Shipped experiments: each composes in both forms, validates, cites its source and has a form for the tiny model."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from grpo_cli.compose import load
from grpo_cli.options import conf_dir

FILES = sorted((Path(conf_dir()) / "experiment").glob("*.yaml"))
NAMES = [file.stem for file in FILES]
PUBLISHED = sorted(set(NAMES) - {"smoke", "quickstart"})


@cache
def config(*overrides):
    loaded = load(list(overrides), "train")
    assert not loaded.errors, [finding.line() for finding in loaded.errors]
    return loaded


def without_time(loaded):
    return {**loaded.resolved, "run": {**loaded.resolved["run"], "dir": None}}


def test_every_experiment_of_the_field_is_there():
    expected = "grpo dapo dr_grpo gspo cispo gmpo sapo rloo reinforce_pp reinforce_pp_baseline gdpo on_policy"
    assert set(expected.split()) == set(PUBLISHED)


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_are_the_same_valid_config(name):
    first, second = config(f"+experiment={name}"), config(f"experiment={name}")
    assert without_time(first) == without_time(second)
    if name in PUBLISHED:
        assert not first.warnings


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_have_a_source(name):
    text = next(file for file in FILES if file.stem == name).read_text()
    assert text.startswith("# @package _global_\n")
    assert re.search(r"arXiv \d{4}\.\d{5}|github\.com", text)


@pytest.mark.parametrize("name", NAMES)
def test_scale_smoke_keeps_the_algorithm(name):
    """Whatever the order; what belongs to the method is the same, what belongs to the machine is small."""
    full, small = config(f"+experiment={name}").config, config(f"+experiment={name}", "+scale=smoke").config
    turned = config("+scale=smoke", f"experiment={name}").config
    assert turned.model_copy(update={"run": small.run}) == small
    for section in ("advantage", "filter"):
        assert getattr(small, section) == getattr(full, section)
    assert small.loss == full.loss.model_copy(update={"constant_length": small.loss.constant_length})
    for key in ("updates_per_step", "epochs_per_step", "lr", "lr_schedule", "betas", "weight_decay", "max_grad_norm"):
        assert getattr(small.trainer, key) == getattr(full.trainer, key)
    assert (small.reward.overlong is None) == (full.reward.overlong is None)
    assert (small.model.path, small.data.name, small.rollout.name) == ("builtin:tiny", "arithmetic", "hf")
    assert small.trainer.steps == 2
    assert small.sequences_per_step % small.trainer.updates_per_step == 0


def test_dapo_has_its_published_numbers():
    """arXiv 2503.14476, section 4.1."""
    cfg = config("+experiment=dapo").config
    assert (cfg.trainer.lr, cfg.trainer.lr_schedule, cfg.trainer.warmup_steps) == (1e-6, "constant", 20)
    assert (cfg.trainer.prompts_per_step, cfg.rollout.num_generations, cfg.trainer.updates_per_step) == (512, 16, 16)
    assert (cfg.loss.clip_low, cfg.loss.clip_high, cfg.loss.aggregation) == (0.2, 0.28, "token_mean")
    assert cfg.loss.kl_coef == 0
    assert (cfg.reward.overlong.max_tokens, cfg.reward.overlong.buffer_tokens) == (20480, 4096)
    assert (cfg.filter.name, cfg.filter.max_rounds) == ("dynamic_sampling", 3)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("dr_grpo", {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "constant", "constant_length": 3000}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"}),
        ("cispo", {"clip_low": None, "clip_high": 4.0, "aggregation": "token_mean"}),
        ("gmpo", {"clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq_mean_token_mean"}),
        ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "seq_mean_token_mean"}),
        ("rloo", {"kl_coef": 0.03}),
        ("reinforce_pp", {"use_kl_in_reward": True, "kl_coef": 1e-4, "kl_estimator": "k1"}),
        ("reinforce_pp_baseline", {"use_kl_in_reward": False, "kl_coef": 1e-3, "kl_estimator": "k2"}),
        ("grpo", {"kl_coef": 0.04, "kl_estimator": "k3", "aggregation": "seq_mean_token_mean"}),
        ("on_policy", {"force_on_policy_ratio": True, "clip_low": None, "clip_high": None}),
    ],
)
def test_losses_have_their_published_numbers(name, loss):
    got = config(f"+experiment={name}").config.loss
    assert {key: getattr(got, key) for key in loss} == loss


def test_another_loss_beside_an_experiment_brings_its_own_numbers():
    cfg = config("+experiment=dapo", "loss=gspo").config
    assert (cfg.loss.clip_low, cfg.loss.clip_high, cfg.loss.aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")


def test_choices_on_the_command_line_beat_an_experiment():
    """`model=` and `data=` beside an experiment choose what they say: no value of the experiment is left in the way."""
    cfg = config("+experiment=dapo", "model=tiny", "data=arithmetic", "reward=number", "rollout=hf").config
    assert (cfg.model.path, cfg.data.name, cfg.rollout.name) == ("builtin:tiny", "arithmetic", "hf")
    assert [term.name for term in cfg.reward.terms] == ["number"]
    assert cfg.data.train is None  # the experiment's file is for data=jsonl
    cfg = config("+experiment=dapo", "model.path=Qwen/Qwen3-1.7B", "data.train=math.jsonl").config
    assert cfg.model.path == "Qwen/Qwen3-1.7B"
    assert Path(cfg.data.train).name == "math.jsonl"


def test_share_is_a_fraction_of_a_count():
    cfg = config("+experiment=dapo", "rollout.max_new_tokens=1000").config
    assert (cfg.reward.overlong.max_tokens, cfg.reward.overlong.buffer_tokens) == (1000, 200)
