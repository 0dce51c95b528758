"""Whole runs of `grpo train` on the smoke experiment, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 600.0
AHEAD = ["rollout.max_staleness=1", "loss.correction.mode=truncate", "loss.correction.high=2.0"]


def command(directory: Path, *overrides: str) -> list[str]:
    base = ["experiment=smoke", "trainer.resume=never", "logger.console=plain", "rollout.sync_tolerance=0.001"]
    return [sys.executable, "-m", "grpo_cli.cli", "train", *base, f"run.dir={directory}", *overrides]


def train(directory: Path, *overrides: str) -> Path:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run(command(directory, *overrides), env=environment, check=True, timeout=TIMEOUT_S)
    return directory


def rows(directory: Path, name: str = "metrics.jsonl") -> list[dict]:
    path = directory / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tokens(directory: Path) -> dict[str, list[list[int]]]:
    groups = [json.loads(line) for path in directory.glob("rollouts/*.jsonl") for line in path.read_text().splitlines()]
    return {group["group_id"]: [completion["token_ids"] for completion in group["completions"]] for group in groups}
