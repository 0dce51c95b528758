"""Time of a training step: what a skipped logprob pass saves, and what packing saves.

    python benchmarks/step_time.py --model builtin:smollm2-135m --prompts 8 --generations 8 --repeat 3

One process, one policy, one batch; the variants take turns, so that a slow moment of the machine hits all of them.
Prints the median seconds of each, on the clock and on the processor, and their ratios.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from grpo_cli.batch import pack
from grpo_cli.compose import compose
from grpo_cli.passes import Pass, Passes
from grpo_cli.process import ranks
from grpo_cli.schema import Config, parse
from grpo_cli.trainer.policy import Policy
from grpo_cli.types import Completion, Group, Prompt

PACKINGS = ("none", "sequence", "shared_prefix")
NONE = Pass(False, "nothing reads it")
SKIPPED = Passes(old=NONE, reference=NONE, entropies=NONE)
OLD_RUNS = Passes(old=Pass(True, "as trainers do that always ask for it"), reference=NONE, entropies=NONE)


def main() -> None:
    args = arguments()
    alone = ranks.start()
    configs = {packing: config(args, packing) for packing in PACKINGS}
    policy = Policy(configs["sequence"], alone)
    groups = make_groups(args, policy.tokenizer.vocab_size)
    variants: dict[str, tuple[Config, Passes]] = {packing: (configs[packing], SKIPPED) for packing in PACKINGS}
    variants["sequence + old pass"] = (configs["sequence"], OLD_RUNS)
    clock: dict[str, list[float]] = {name: [] for name in variants}
    processor: dict[str, list[float]] = {name: [] for name in variants}
    tokens = {}
    for turn in range(args.repeat + 1):
        for name, (cfg, passes) in variants.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            batch = pack(groups, cfg, alone)
            policy.add_logprobs(batch, passes)
            policy.update(batch, turn + 1)
            if turn:  # the first turn warms up
                clock[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - start_cpu)
            tokens[name] = sum(micro.size for micro in batch.micro_batches)
    cpu = {name: statistics.median(values) for name, values in processor.items()}
    for name, value in cpu.items():
        wall, ratio = statistics.median(clock[name]), value / cpu["sequence"]
        print(f"{name:20} {wall:8.3f} s   {value:8.3f} s of CPU   {tokens[name]:6d} tokens   {ratio:.2f} x sequence")
    saving = 1 - cpu["sequence"] / cpu["sequence + old pass"]
    print(f"loss.force_on_policy_ratio=true skips the old pass: {saving:.0%} of the step's CPU time saved")
    ranks.leave(0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=45)
    parser.add_argument("--completion-tokens", type=int, default=24, help="longest completion; lengths are uniform")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def config(args: argparse.Namespace, packing: str) -> Config:
    composed = compose(
        [
            "run.dir=unused",
            "model=hf",
            f"model.path={args.model}",
            f"model.dtype={args.dtype}",
            "model.gradient_checkpointing=false",
            f"data.max_prompt_tokens={args.prompt_tokens}",
            f"rollout.max_new_tokens={args.completion_tokens}",
            "loss.force_on_policy_ratio=true",
            f"trainer.micro_batch_tokens={args.micro_batch_tokens}",
            f"trainer.packing={packing}",
            f"trainer.zero_stage={args.zero_stage}",
        ]
    )
    assert composed.config is not None, composed.findings
    return parse(composed.config)


def make_groups(args: argparse.Namespace, vocabulary: int) -> list[Group]:
    draw = random.Random(0)
    groups = []
    for g in range(args.prompts):
        prompt = Prompt(f"row-{g}", "", [draw.randrange(vocabulary) for _ in range(args.prompt_tokens)], None)
        completions = []
        for i in range(args.generations):
            ids = [draw.randrange(vocabulary) for _ in range(draw.randint(1, args.completion_tokens))]
            reward = float(i % 2)
            completions.append(Completion("", ids, "stop", unshaped=reward, reward=reward, advantage=reward - 0.5))
        groups.append(Group(f"1-{g}", prompt, completions, 1, 0))
    return groups


if __name__ == "__main__":
    main()
