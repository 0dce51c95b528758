"""One colocated engine on the first CUDA device, in a process of its own: `python -m … SLEEP_LEVEL` prints a report.

An engine that shared its process with another's left-overs would not show what it gives back.
"""

from __future__ import annotations

import json
import sys

import torch

from grpo_cli.process.ranks import Ranks
from grpo_cli.rollout import make_rollout
from grpo_cli.rollout.sync import logprob_gap, probe_tokens
from tests.rollout import engines

SYNCS = 3


def free_share() -> float:
    """Free memory of the device, as a share of all of it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return free / total


def report(sleep_level: int, *overrides: str) -> dict[str, list[float]]:
    """What each of three rounds (weights moved, sync, generation) measured."""
    torch.cuda.set_device(0)
    policy = engines.Policy(device="cuda:0", dtype=torch.bfloat16)
    words = ("rollout=vllm", f"rollout.sleep_level={sleep_level}", "model.dtype=bfloat16", *overrides)
    rollout = make_rollout(engines.config(*words), policy, Ranks(0, 1, 0, torch.device("cuda", 0)))
    asked = engines.prompts(policy, "What is 1 + 2?", "Hi")
    probe = probe_tokens(policy.tokenizer)
    found: dict[str, list[float]] = {"moved": [], "gap": [], "sampled": [], "free_awake": [], "free_after": []}
    rollout.generate(asked, 1, 0)
    for number in range(1, SYNCS + 1):
        before = policy.score(*probe)
        policy.move(0.3, seed=number)
        found["moved"].append(logprob_gap(policy.score(*probe), before))
        found["gap"].append(rollout.sync(policy, number)["sync/logprob_gap_max"])
        found["free_awake"].append(free_share())
        groups = rollout.generate(asked, number + 1, number)
        found["free_after"].append(free_share())
        found["sampled"].append(engines.largest_gap(policy, groups))
    rollout.close()
    return found


if __name__ == "__main__":
    print(json.dumps(report(int(sys.argv[1]), *sys.argv[2:])))
