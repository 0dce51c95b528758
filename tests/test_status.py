"""The ledger adds up, and status tells it from the files alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configs import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli import status
from grpo_cli.errors import ConfigError
from grpo_cli.files import ledger
from grpo_cli.files.jsonio import read_rows
from grpo_cli.files.rundir import RunDir
from grpo_cli.types import Group, Prompt


def data(consumed: int, rows: int = 10, total: int | None = None) -> Any:
    return SimpleNamespace(state=lambda: {"consumed": consumed}, train_rows=rows, total=total)


def group(prompt: str, dropped: str | None = None) -> Group:
    made = make_group(1.0, 0.0)
    made.prompt = Prompt(prompt, "", [1], "0")
    made.dropped = dropped  # type: ignore[assignment]
    return made


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.begin(seed=1, steps=3)
    ledger.append(run_dir, 1, [group("row-1"), group("row-2")], [group("row-3", "zero_std")], data(4, total=20))
    ledger.append(
        run_dir, 2, [group("row-4")], [group("row-5", "stale"), group("row-6", "unscored")], data(9, total=20)
    )
    return run_dir


def test_every_drawn_prompt_has_one_fate_or_is_pending(run_dir: RunDir) -> None:
    told = status.status(run_dir.path)["prompts"]
    assert told["drawn"] == 9
    assert told["trained"] == 3
    assert told["dropped"] == {"stale": 1, "unscored": 1, "zero_std": 1}
    assert told["pending"] == 3  # 9 - 3 - 3: carried, or still being generated
    assert told["epochs"] == 0.9


def test_lines_for_a_person(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir.end(143, "stopped by signal 15")
    assert status.main([str(run_dir.path)]) == 0
    told = capsys.readouterr().out
    assert "stopped, exit code 143, step 0 of 3, attempt 1" in told
    assert "Prompts drawn: 9, 0.90 passes over 10 rows" in told
    assert "  dropped 1 (zero_std)" in told
    assert "  pending 3" in told
    assert "  not drawn yet 11 of 20" in told


def test_ledger_that_contradicts_itself_is_told(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    ledger.append(run_dir, 3, [group("row-1"), group("row-7")], [], data(10))  # row-1 twice in the first epoch
    assert status.main([str(run_dir.path), "--json"]) == 1
    [fault] = json.loads(capsys.readouterr().out)["faults"]
    assert "row-1" in fault
    ledger.append(run_dir, 4, [group(f"row-{i}") for i in range(10)], [], data(11))
    assert "only 11 were drawn" in status.status(run_dir.path)["faults"][0]


def test_run_that_was_killed_is_lost_and_a_live_one_is_not(run_dir: RunDir) -> None:
    run_dir.update(status="running", step=2)
    assert status.status(run_dir.path)["status"] == "lost"
    run_dir.lock()
    told = status.status(run_dir.path)
    assert (told["status"], told["alive"]) == ("running", True)
    run_dir.unlock()


def test_checkpoints_are_judged(run_dir: RunDir) -> None:
    (run_dir.checkpoints / "step_000002").mkdir(parents=True)
    [checkpoint] = status.status(run_dir.path)["checkpoints"]
    assert checkpoint == {"step": 2, "whole": False, "problems": ["it is empty"]}


def test_no_run_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run\.json"):
        status.main([str(tmp_path)])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 12))
def test_counts_add_up_whatever_happens(seed: int, rows: int, steps: int) -> None:
    """A random run: epochs in order, some prompts carried for a step, some dropped. Nothing is lost or counted
    twice."""
    draw = random.Random(seed)
    lines, waiting, drawn = [], [], 0
    for step in range(1, steps + 1):
        new = [f"row-{(drawn + i) % rows}" for i in range(draw.randint(0, 5))]
        drawn += len(new)
        waiting += new
        decided, waiting = waiting[: draw.randint(0, len(waiting))], waiting
        waiting = waiting[len(decided) :]
        dropped: dict[str, list[str]] = {}
        trained = []
        for prompt in decided:
            fate = draw.choice([None, "zero_std", "stale"])
            (trained if fate is None else dropped.setdefault(fate, [])).append(prompt)
        lines.append(
            {"step": step, "drawn": drawn, "rows": rows, "total": None, "trained": trained, "dropped": dropped}
        )
    fates = ledger.add_up(lines)
    assert fates.decided + fates.pending == drawn
    assert fates.pending == len(waiting)
    assert fates.faults() == []


def test_ledger_lines_are_small_and_read_back(run_dir: RunDir) -> None:
    [first, _] = read_rows(run_dir.ledger_path)
    assert first == {
        "step": 1,
        "drawn": 4,
        "rows": 10,
        "total": 20,
        "trained": ["row-1", "row-2"],
        "dropped": {"zero_std": ["row-3"]},
    }
