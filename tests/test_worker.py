"""Whole runs of `grpo train` on the tiny model: what they write, how they end, what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from grpo_cli.checkpoint import manifest
from grpo_cli.replay import replay

BASE = ("+experiment=smoke", "trainer.prompts_per_step=2", "rollout.num_generations=4", "rollout.max_new_tokens=4")

REWARDS = """
CALLS = []
TABLE = {table}

def scripted(prompts, completions):
    CALLS.append(1)
    return TABLE[(len(CALLS) - 1) % len(TABLE)]
"""


def start(run_dir: Path, *overrides: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_cli.cli", "train", *BASE, f"run.dir={run_dir}", *overrides],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess:
    process = start(run_dir, *overrides)
    output, _ = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def state(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def scripted_term(directory: Path, table: list[list[float]]) -> str:
    """Override of reward.terms: in the n-th step, the 8 completions get the n-th list."""
    path = directory / "scripted.py"
    path.write_text(REWARDS.format(table=table))
    return f"reward.terms=[{{name: python, weight: 1.0, path: {path}, function: scripted}}]"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> Path:
    """A run of three steps whose rewards are known: step 2 has no signal at all."""
    home = tmp_path_factory.mktemp("scripted")
    table = [[1, 0, 0, 0, 1, 1, 1, 1], [0.1] * 8, [1, 1, 0, 0, 0, 0, 0, 1]]
    done = train(home / "run", scripted_term(home, table), "trainer.steps=3")
    assert done.returncode == 0, done.stdout
    return home / "run"


def test_metrics_of_known_rewards(scripted):
    first, second, third = rows(scripted)
    # Groups (1,0,0,0) and (1,1,1,1): the second is dropped; mean over both 5/8, over the kept one 1/4.
    assert first["reward"] == pytest.approx(5 / 8)
    assert first["reward_kept"] == pytest.approx(1 / 4)
    assert first["frac_reward_zero_std"] == 0.5
    assert first["groups/dropped_count"] == 1
    assert first["groups/dropped_reward_mean"] == pytest.approx(1.0)
    # std of (1,0,0,0) is 1/2, of (1,1,1,1) 0; mean 1/4. Of all eight: sqrt(8 * 5/8 * 3/8 / 7) = 0.517549.
    assert first["reward_std_within_group"] == pytest.approx(0.25)
    assert first["reward_std"] == pytest.approx(0.5175492)
    assert third["reward"] == pytest.approx(3 / 8)
    assert third["groups/dropped_count"] == 0
    assert [second["step"], third["step"]] == [2, 3]


def test_a_step_without_signal_is_logged_and_changes_nothing(scripted):
    _, empty, _ = rows(scripted)
    assert empty["frac_reward_zero_std"] == 1.0
    assert empty["updates/applied_count"] == 0
    assert empty["groups/dropped_count"] == 2
    assert empty["reward"] == pytest.approx(0.1)
    assert not {"loss", "grad_norm", "ratio/mean", "reward_kept", "kl"} & empty.keys()


def test_skipped_passes_leave_no_trace(scripted):
    for row in rows(scripted):
        assert not {"time/old_logprobs", "time/ref_logprobs", "kl"} & row.keys()


def test_the_dump_replays_to_the_logged_loss(scripted):
    step = rows(scripted)[0]
    groups = [json.loads(line) for line in (scripted / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    again = replay([*BASE, "trainer.steps=3"], groups)
    assert [group["dropped"] for group in again["groups"]] == [None, "zero_std"]
    assert again["loss"] == pytest.approx(step["loss"], abs=1e-6)
    # (1 - 1/4) / (1/2 + 1e-6): the kept group's first completion.
    assert again["groups"][0]["advantages"][0] == pytest.approx(1.499997, abs=1e-5)


def test_what_a_run_leaves_behind(scripted):
    assert state(scripted)["status"] == "done"
    assert state(scripted)["exit_code"] == 0
    assert {path.name for path in scripted.iterdir()} >= {
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "rollouts",
        "model",
    }
    assert (scripted / "model" / "model.safetensors").is_file()


def test_every_logged_key_is_described(scripted):
    described = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    keys = {key for row in rows(scripted) for key in row}
    undescribed = {key for key in keys if f"`{key}`" not in described and not key.startswith("rewards/")}
    assert not undescribed


def test_no_signal_for_too_long_ends_with_a_guard(tmp_path):
    term = scripted_term(tmp_path, [[0.3] * 8])
    done = train(tmp_path / "run", term, "filter=dynamic_sampling", "filter.max_rounds=2", "filter.max_empty_steps=2")
    assert done.returncode == 3, done.stdout
    told = state(tmp_path / "run")
    assert told["status"] == "guard"
    assert "max_empty_steps" in told["reason"]
    assert "2 rounds" in told["reason"]
    assert len(rows(tmp_path / "run")) == 2


def test_a_non_finite_loss_is_never_applied_and_stays_visible(tmp_path):
    # 1e50 is a finite reward, but no float32 holds its loss; without a deviation to divide by it stays that large.
    term = scripted_term(tmp_path, [[1, 0, 0, 0, 1, 1, 0, 0], [1e50, 0, 0, 0, 1, 0, 0, 0]])
    guards = ["advantage=dr_grpo", "trainer.steps=4", "trainer.max_nonfinite_steps=1", "trainer.save_every=1"]
    done = train(tmp_path / "run", term, *guards)
    assert done.returncode == 3, done.stdout
    first, second = rows(tmp_path / "run")
    assert first["loss"] is not None
    assert second["loss"] is None
    assert second["grad_norm"] is None
    assert second["updates/nonfinite_count"] == 1
    assert second["updates/applied_count"] == 0
    assert "step 2" in state(tmp_path / "run")["reason"]
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for directory in checkpoints:
        assert manifest.problems(directory) == []
        assert all(tensor.isfinite().all() for tensor in load_file(directory / "slices_00000.safetensors").values())
    assert checkpoints[0].name == "step_000001"


def test_sigterm_saves_and_leaves_no_process(tmp_path):
    process = start(tmp_path / "run", "trainer.steps=1000", "trainer.save_every=1000")
    try:
        wait_for_rows(tmp_path / "run", 2, process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, output
    assert state(tmp_path / "run")["status"] == "stopped"
    assert state(tmp_path / "run")["exit_code"] == 128 + signal.SIGTERM
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def wait_for_rows(run_dir: Path, count: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if (run_dir / "metrics.jsonl").is_file() and len(rows(run_dir)) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{run_dir} has no {count} rows: {process.communicate(timeout=10)[0]}")
