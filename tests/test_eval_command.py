"""`grpo eval` as a user types it: real processes, a real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def grpo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "grpo_cli.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_one_and_two_processes_find_the_same(tmp_path):
    common = ["eval", "--json", "+experiment=smoke", "eval.limit=7", "eval.samples=4", "eval.temperature=1.0"]
    found = []
    (tmp_path / "run1" / "eval").mkdir(parents=True)
    (tmp_path / "run1" / "eval" / "eval.json").write_text('{"eval/avg@4": 0.99}')  # of another day
    for world in (1, 2):
        done = grpo(*common, "eval.k=[1,2]", f"trainer.nproc_per_node={world}", f"run.dir=run{world}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        metrics = json.loads(done.stdout)
        assert metrics.pop("time/eval") > 0
        found.append(metrics)
        assert json.loads((tmp_path / f"run{world}" / "eval" / "run.json").read_text())["status"] == "done"
    assert found[0] == pytest.approx(found[1])
    assert found[0]["eval/prompts_count"] == 7
    assert 0 < found[0]["eval/avg@4"] < found[0]["eval/pass@2"] < 1  # digits are in some of the random completions


def test_rows_to_evaluate_on_are_asked_for(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    data = ["data=jsonl", "data.train=train.jsonl", "data.prompt_key=question", "data.answer_key=answer"]
    done = grpo("eval", "+experiment=smoke", "reward=number", *data, cwd=tmp_path)
    assert done.returncode == 2
    assert "data.eval=FILE" in done.stderr
    assert done.stdout == ""
