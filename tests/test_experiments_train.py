"""Every shipped experiment trains two steps at `+scale=smoke`, and `grpo replay` finds in its dump what the run did."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_cli.replay import replay

# test_experiments.py knows that these are all.
PUBLISHED = [
    *("cispo", "dapo", "dr_grpo", "gdpo", "gmpo", "grpo", "gspo", "on_policy"),
    *("reinforce_pp", "reinforce_pp_baseline", "rloo", "sapo"),
]
NEEDS_REFERENCE = ("grpo", "on_policy", "reinforce_pp", "reinforce_pp_baseline", "rloo")
WITHOUT_OLD_PASS = ("grpo", "on_policy")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directory of the runs, one a name; all are trained in one process."""
    top = tmp_path_factory.mktemp("runs")
    worker = Path(__file__).parent / "smoke_worker.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, worker, top, *PUBLISHED], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return top


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_trains(runs, name):
    steps = rows(runs / name / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert all(value is None or math.isfinite(value) for value in row.values())
        assert None not in row.values()
        if row["updates/applied_count"]:
            assert ("kl" in row) == ("time/ref_logprobs" in row) == (name in NEEDS_REFERENCE)
            assert ("time/old_logprobs" in row) == (name not in WITHOUT_OLD_PASS)
            assert row["ratio/mean"] == pytest.approx(1.0, abs=0.05)
            if name in WITHOUT_OLD_PASS:
                assert row["ratio/min"] == row["ratio/max"] == 1.0
    assert sum(row["updates/applied_count"] for row in steps) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_replay_of_its_dump_agrees(runs, name):
    """Rewards, drops and advantages of the run, recomputed from its dump with its own config."""
    groups = rows(runs / name / "rollouts" / "step_000001.jsonl")
    trained = [group for group in groups if group["dropped"] not in ("surplus", "stale")]
    got = replay([f"+experiment={name}", "+scale=smoke"], trained)
    assert [one["dropped"] for one in got["groups"]] == [group["dropped"] for group in trained]
    for one, group in zip(got["groups"], trained, strict=True):
        if one["advantages"] is not None and group["dropped"] is None:
            wanted = [completion["advantage"] for completion in group["completions"]]
            assert one["advantages"] == pytest.approx(wanted, abs=1e-9)
    first = rows(runs / name / "metrics.jsonl")[0]
    assert got["metrics"]["loss/tokens_count"] == first["loss/tokens_count"]
    everything = replay([f"+experiment={name}", "+scale=smoke"], groups)
    assert everything["metrics"]["reward"] == pytest.approx(first["reward"], abs=1e-9)
