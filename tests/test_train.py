"""What `train` does before a run: nothing is launched with an error, and paths are those of the caller."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from grpo_cli import cli
from grpo_cli.errors import Finding


@pytest.fixture
def launched(monkeypatch):
    """What `train` hands to the launcher; the checks of a run's start find nothing."""
    calls = []
    monkeypatch.setattr("grpo_cli.launch.launch", lambda config, run_dir: calls.append((config, run_dir)) or 0)
    monkeypatch.setattr("grpo_cli.checks.start.check", lambda config: [])
    return calls


def test_train_launches_what_was_composed(launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "experiment=smoke", "run.dir=R", "hydra.verbose=true", "hydra.job.chdir=true"]) == 0
    [(config, run_dir)] = launched
    assert run_dir == tmp_path / "R"
    assert config["run"]["dir"] == str(tmp_path / "R")
    assert config["model"]["path"] == "builtin:tiny"


def test_train_launches_nothing_with_an_error(launched, capsys):
    assert cli.main(["train", "+experiment=smoke", "rollout.num_generations=1"]) == 2
    assert launched == []
    assert "[group_advantage_needs_two_generations]" in capsys.readouterr().err


def test_train_launches_nothing_when_a_start_check_fails(launched, monkeypatch, capsys):
    bad = [Finding("data_file_readable", ("data.train",), "No file.", "data.train=x")]
    monkeypatch.setattr("grpo_cli.checks.start.check", lambda config: bad)
    assert cli.main(["train", "+experiment=smoke"]) == 2
    assert launched == []
    assert "[data_file_readable]" in capsys.readouterr().err


@pytest.mark.parametrize("multirun", [[], ["-m", "run.seed=0,1"]])
@pytest.mark.parametrize("chdir", [[], ["hydra.job.chdir=true"], ["hydra.job.chdir=false"]])
def test_relative_paths_are_those_of_the_caller(launched, tmp_path, monkeypatch, multirun, chdir):
    """Case I12."""
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    term = "reward.terms=[{name: python, weight: 1.0, path: ../f.py, function: g}]"
    data = ["data=jsonl", "data.train=./d.jsonl", 'data.eval="~/e.jsonl"']
    assert cli.main(["train", *multirun, "+experiment=smoke", *data, term, *chdir]) == 0
    assert Path.cwd() == tmp_path / "sub"
    assert len(launched) == (2 if multirun else 1)
    config, run_dir = launched[-1]
    assert config["data"]["train"] == str(tmp_path / "sub" / "d.jsonl")
    assert config["data"]["eval"] == str(tmp_path / "home" / "e.jsonl")
    assert config["reward"]["terms"][0]["path"] == str(tmp_path / "f.py")
    assert run_dir.is_relative_to(tmp_path / "sub" / "runs" / "smoke")


@pytest.mark.parametrize(
    ("mode", "installed", "code"),
    [
        ("online", True, 2),
        ("offline", True, 0),
        ("disabled", True, 0),
        ("ofline", True, 2),
        ("offline", False, 2),
        ("disabled", False, 0),
    ],
)
def test_wandb_without_a_key_is_an_exit_code_and_never_a_question(mode, installed, code, monkeypatch, tmp_path, capsys):
    """Case J01: nothing is imported of W&B, so nothing can ask."""
    calls = []
    monkeypatch.setattr("grpo_cli.launch.launch", lambda config, run_dir: calls.append(run_dir) or 0)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "grpo_cli.checks.start.rundir.importlib.util.find_spec",
        lambda name: None if name == "wandb" and not installed else find_spec(name),
    )
    run = ["train", "+experiment=smoke", f"run.dir={tmp_path}/run", "trainer.resume=never"]
    assert cli.main([*run, f"logger.wandb.mode={mode}"]) == code
    assert len(calls) == (code == 0)
    if (mode, installed) == ("online", True):
        assert "WANDB_API_KEY" in capsys.readouterr().err
