"""`grpo validate` from the shell, in turn with a bare import of Hydra and pydantic. Target: an answer in a second."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 11
SECONDS = 1.0
COMMANDS = {
    "python": ["-c", "pass"],
    "import hydra, pydantic": ["-c", "from hydra import compose; from pydantic import BaseModel"],
    "grpo validate": ["-m", "grpo_cli.cli", "validate", "+experiment=grpo"],
    "grpo validate, refused": [
        *("-m", "grpo_cli.cli", "validate", "+experiment=grpo", "loss.use_kl_in_reward=true", "loss.kl_coef=0.01"),
        "loss.force_on_policy_ratio=true",
    ],
}


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    return time.perf_counter() - started


def main() -> int:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    for name, median in medians.items():
        print(f"{name:24} {median:.2f} s, {median / medians['import hydra, pydantic']:.2f} of the bare import")
    return 0 if max(medians.values()) < SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
