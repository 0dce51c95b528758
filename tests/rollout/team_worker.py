"""What each process of test_vllm_team.py runs: the step of its engine at which it is told to stop."""

from __future__ import annotations

from itertools import count

from grpo_cli.process import ranks
from grpo_cli.process.signals import stop
from grpo_cli.rollout.vllm import team_group, told_to_stop

SIGNALS = {1: 5, 3: 20}
"""Rank -> the step at which its signal comes."""


def main() -> None:
    processes = ranks.start(timeout_s=60)
    group = team_group(processes, 2)
    at = next(step for step in count(1) if told_at(step, processes.rank, group))
    print(at, flush=True)
    ranks.leave(0)


def told_at(step: int, rank: int, group: object) -> bool:
    if step == SIGNALS.get(rank):
        stop._signum = 15
    return told_to_stop(step, group)


if __name__ == "__main__":
    main()
