"""The smoke experiment from the shell: it learns, and what it writes down of its rollouts is what was sampled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_cli.model.builtin import tiny_tokenizer

pytestmark = pytest.mark.slow


def train(run_dir: Path, *overrides: str) -> tuple[list[dict], list[dict]]:
    """Metrics by step, and the groups of every dump."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "grpo_cli.cli", "train", "+experiment=smoke", f"run.dir={run_dir}", *overrides]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    dumps = sorted((run_dir / "rollouts").iterdir())
    return rows, [json.loads(line) for dump in dumps for line in dump.read_text().splitlines()]


def test_reward_visibly_rises(tmp_path):
    rows, _ = train(tmp_path / "run")
    rewards = [row["reward"] for row in rows]
    assert len(rewards) == 20
    assert sum(rewards[:5]) / 5 < 0.45
    assert sum(rewards[-5:]) / 5 > 0.8
    assert max(row["sync/logprob_gap_max"] for row in rows) < 1e-4


def test_sampler_and_trainer_agree_at_another_temperature(tmp_path):
    """Two updates a step, so that the old pass runs. In the dump a completion that stopped ends with the EOS."""
    _, groups = train(tmp_path / "run", "trainer.steps=2", "trainer.updates_per_step=2", "rollout.temperature=0.6")
    completions = [(group, completion) for group in groups for completion in group["completions"]]
    eos = tiny_tokenizer().eos_token_id
    compared = 0
    for group, completion in completions:
        tokens = completion["token_ids"]
        assert len(completion["sampler_logprobs"]) == len(tokens) <= 16
        assert (completion["finish_reason"] == "stop") == (tokens[-1] == eos)
        if group["dropped"] is None:
            assert completion["old_logprobs"] == pytest.approx(completion["sampler_logprobs"], abs=1e-3)
            compared += 1
    assert compared >= 8
    assert {group["policy_version"] for group in groups} == {0, 1}
