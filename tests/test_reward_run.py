"""Whole runs on the tiny model: what a failing reward term does to the exit code, the counts and the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from inprocess import metrics, train
from safetensors.torch import load_file

TERMS = """
step = 0

def infinite(completions):
    global step
    step += 1
    rewards = [float(len(set(text))) for text in completions]
    if step == 2:
        rewards[1] = float("inf")
    return rewards

def raises(completions):
    raise RuntimeError("the judge is down")

def needs_solution(prompts, completions, solution):
    return [0.0] * len(completions)
"""


def term(folder: Path, function: str) -> str:
    (folder / "terms.py").write_text(TERMS)
    return f"reward.terms=[{{name: python, weight: 1.0, path: {folder}/terms.py, function: {function}}}]"


def grpo(folder: Path, command: str, function: str, *overrides: str) -> subprocess.CompletedProcess:
    sizes = ["trainer.steps=3", "trainer.prompts_per_step=2", "rollout.num_generations=4", "rollout.max_new_tokens=6"]
    arguments = [
        command,
        "model=tiny",
        "reward=python",
        term(folder, function),
        *sizes,
        "run.dir=run",
        "trainer.save_every=null",
    ]
    return subprocess.run(
        [sys.executable, "-m", "grpo_cli.cli", *arguments, "logger.console=plain", *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a06_an_infinite_reward_never_reaches_the_weights(tmp_path, caplog):
    run = tmp_path / "run"
    assert train(run, term(tmp_path, "infinite"), "trainer.steps=3", "reward.on_error=unscored", "filter=none") == 0
    assert "reward term infinite could not score prompt row-" in caplog.text
    assert "step 2: returned inf" in caplog.text
    assert [step["completions/unscored_count"] for step in metrics(run)] == [0.0, 1.0, 0.0]
    assert [step["reward/error_count"] for step in metrics(run)] == [0.0, 1.0, 0.0]
    weights = load_file(run / "model" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.slow
def test_a15_when_all_fail_every_group_is_dropped_and_the_guard_stops_the_run(tmp_path):
    forgiving = ["reward.on_error=unscored", "filter=zero_std", "filter.max_empty_steps=2"]
    stopped = grpo(tmp_path, "train", "raises", *forgiving)
    assert stopped.returncode == 3, stopped.stderr
    assert "RuntimeError: the judge is down (terms.py:13)" in stopped.stderr
    assert [step["groups/unscored_count"] for step in metrics(tmp_path / "run")] == [2.0, 2.0]
    assert all("reward" not in step for step in metrics(tmp_path / "run"))  # no curve of zeros


def test_a14_and_g05_are_told_at_once_although_the_model_is_missing(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n{"prompt": "2 + 2?", "answer": "4"}\n')
    data = ["data=jsonl", "data.train=d.jsonl", "data.prompt_key=question", "model.path=./nothing-here"]
    refused = grpo(tmp_path, "train", "needs_solution", *data)
    assert refused.returncode == 2
    for rule in ("python_reward_callable", "data_has_keys", "model_readable"):
        assert f"[{rule}]" in refused.stderr
    assert not (tmp_path / "run").exists()
    assert "what can be passed is prompts, completions, answer, completion_ids, question." in refused.stderr
    assert f"{tmp_path}/d.jsonl:2: no column question" in refused.stderr
