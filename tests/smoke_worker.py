"""Trains experiments at `+scale=smoke`, one after the other in this process: argv is a directory and their names.

The launcher is left out (its tests are in test_launch.py), so that torch and DeepSpeed are imported once for all.
"""

import sys
from pathlib import Path

from grpo_cli.compose import load
from grpo_cli.files.rundir import RunDir
from grpo_cli.process.frame import run_worker
from grpo_cli.worker import work


def main() -> None:
    top = Path(sys.argv[1])
    for name in sys.argv[2:]:
        overrides = [f"+experiment={name}", "+scale=smoke", f"run.dir={top / name}", "logger.console=off"]
        loaded = load(overrides, "train")
        loaded.require()
        run_dir = RunDir.create(top / name)
        run_dir.write_config(loaded.resolved)
        run_dir.begin(seed=0, steps=2)
        work(run_dir)


if __name__ == "__main__":
    run_worker(main)
