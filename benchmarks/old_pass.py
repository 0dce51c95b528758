"""What the old-logprob pass costs: the time of one step with and without it, on the same batch.

    python benchmarks/old_pass.py [--rounds 5]

One optimizer update a step. With `force_on_policy_ratio`, and also without it where nothing else reads the old
logprobs, the pass is skipped; `seq_logprob_error_threshold` makes it run. All configs see the same batch and are timed
in turn in one process, in CPU seconds of all threads; medians are printed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from grpo_cli.advantage import assign
from grpo_cli.batch import pack
from grpo_cli.compose import load
from grpo_cli.process.ranks import Ranks, start
from grpo_cli.trainer.policy import Policy
from grpo_cli.types import Completion, Group, Prompt

BASE = ["model=tiny", "trainer.micro_batch_tokens=4096", "rollout.max_new_tokens=256", "trainer.steps=1000"]
CONFIGS = {
    "force_on_policy_ratio": ["loss.force_on_policy_ratio=true", "loss.clip_low=null", "loss.clip_high=null"],
    "without it, nothing reads old": [],
    "with the old pass": ["loss.seq_logprob_error_threshold=1000.0"],
    "with the reference pass": ["loss.kl_coef=0.01"],
}


def make_groups() -> list[Group]:
    """Eight groups of eight completions of 256 random tokens, rewards alternating."""
    stream = random.Random(0)

    def completion(reward: float) -> Completion:
        ids = [stream.randrange(256) for _ in range(256)]
        sampled = [-5.5] * len(ids)
        return Completion("", ids, "stop", {"x": reward}, unshaped=reward, reward=reward, sampler_logprobs=sampled)

    prompt = Prompt("0", "", [1] * 32, None)
    return [Group(f"1-{g}", prompt, [completion(float(i % 2)) for i in range(8)], 1, 0) for g in range(8)]


class Side:
    """One config with its policy."""

    def __init__(self, overrides: list[str], ranks: Ranks):
        self.cfg = load([*BASE, *overrides], "train").require()
        self.ranks = ranks
        self.policy = Policy(self.cfg, ranks, self.cfg.trainer.steps)
        self.steps = 0

    def step(self) -> float:
        """CPU seconds of the passes and the update; making the batch is not counted."""
        groups = assign(make_groups(), self.cfg)
        batch = pack(groups, self.cfg, self.ranks)
        self.steps += 1
        started = time.process_time()
        self.policy.add_logprobs(batch)
        self.policy.update(batch, self.steps)
        return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="steps that each config is timed for")
    rounds = parser.parse_args().rounds
    ranks = start()
    sides = {name: Side(overrides, ranks) for name, overrides in CONFIGS.items()}
    for side in sides.values():
        side.step()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side.step())
    medians = {name: statistics.median(values) for name, values in times.items()}
    shortest = medians["force_on_policy_ratio"]
    print(f"one step of 64 completions x 256 tokens, tiny model, medians of {rounds}")
    for name, median in medians.items():
        print(f"{name:<32} {median:6.2f} s   {median / shortest:5.2f} x")


if __name__ == "__main__":
    main()
