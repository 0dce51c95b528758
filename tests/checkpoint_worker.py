"""What each process of the checkpoint tests runs: python -m tests.checkpoint_worker MODEL OUT JOBS

JOBS is a JSON list of [overrides, run directory, checkpoint to resume or "never", last step]; rank 0 writes what `job`
returns for each to OUT.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_cli.batch import pack
from grpo_cli.checkpoint import manifest
from grpo_cli.checkpoint import store as checkpoint
from grpo_cli.files.rundir import RunDir
from grpo_cli.process import ranks
from grpo_cli.process.ranks import Ranks
from grpo_cli.trainer.policy import Policy
from tests import tiny

SAVED = 2
"""Step after which every job saves, and after its last."""


def job(model: str, overrides: list[str], directory: str, resume: str, last: int, processes: Ranks) -> dict[str, Any]:
    """Train to `last`, from the start or from a checkpoint: rows of the steps, weights, random draws, final files."""
    keys = ["logger.console=off", "trainer.lr=1e-3", "trainer.updates_per_step=2", f"trainer.resume={resume}"]
    cfg = tiny.config(f"model.path={model}", *keys, *overrides)
    run_dir = RunDir.create(directory)
    policy = Policy(cfg, processes)
    random.seed(processes.rank)
    np.random.seed(processes.rank)
    state = checkpoint.load(cfg, run_dir, processes, policy)
    done = 0
    if state is not None:
        policy.load_state(state["policy"])
        done = state["step"]
    rows = []
    for step in range(done + 1, last + 1):
        batch = pack(tiny.make_groups(seed=step), cfg, processes)
        metrics = policy.add_logprobs(batch) | policy.update(batch, step)
        policy.version = step
        draws = [random.random(), float(np.random.random()), float(torch.rand(()))]
        rows.append({k: v for k, v in metrics.items() if not k.startswith(("time/", "update/"))} | {"draws": draws})
        if step in (SAVED, last):
            saved = checkpoint.save(cfg, run_dir, processes, policy, {"step": step, "policy": policy.state()})
    weights = {name: tensor.double().sum().item() for name, tensor in policy.gathered_parameters()}
    files = {name: entry["sha256"] for name, entry in (manifest.read(saved) or {})["files"].items()}
    return {
        "rows": rows,
        "weights": weights,
        "files": files,
        "version": policy.version,
        "problems": manifest.problems(saved),
    }


def main(model: str, out: str, jobs: str) -> None:
    processes = ranks.start(timeout_s=60)
    results = [job(model, *arguments, processes) for arguments in json.loads(jobs)]
    if processes.first:
        Path(out).write_text(json.dumps(results))
    processes.barrier()
    ranks.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
