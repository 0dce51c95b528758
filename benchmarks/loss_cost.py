"""What advantage and loss cost beside the model: 512 sequences of 1,024 tokens against one forward of a 135M Llama.

    python benchmarks/loss_cost.py [--rounds 5]

Both are timed in turn in one process, in CPU seconds of all threads (neighbours on the machine then do not count), and
medians are compared. The forward is timed on one sequence and scaled to 512, since sequences add up and all of them
would take half an hour; everything else is timed at full size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_cli.advantage import assign
from grpo_cli.compose import load
from grpo_cli.loss import Tokens, policy_loss, prepare
from grpo_cli.schema import Config
from grpo_cli.types import Completion, Group, Prompt

SEQUENCES, LENGTH, GENERATIONS = 512, 1024, 8

CONFIGS = {
    "grpo": ["loss.kl_coef=0.04"],
    "dapo": ["loss=dapo"],
    "gspo": ["loss=gspo"],
    "gmpo": ["loss=gmpo"],
    "reinforce_pp, KL in the reward": ["advantage=reinforce_pp", "loss.use_kl_in_reward=true", "loss.kl_coef=0.01"],
    "top-entropy and correction": [
        "loss.top_entropy_quantile=0.2",
        "loss.correction.mode=truncate",
        "loss.correction.high=2.0",
    ],
}


def make_groups() -> list[Group]:
    """Groups of eight scored completions; only rewards and lengths matter here."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(SEQUENCES, generator=generator).round(decimals=1).tolist()
    ids = [0] * LENGTH
    completions = [Completion("", ids, "stop", {"exact": r}, unshaped=r, reward=r) for r in rewards]
    return [
        Group(f"1-{g}", Prompt(str(g), "", [0], None), completions[g * GENERATIONS : (g + 1) * GENERATIONS], 1, 1)
        for g in range(SEQUENCES // GENERATIONS)
    ]


def make_tokens(groups: list[Group], cfg: Config) -> tuple[Tokens, torch.Tensor]:
    """All tokens of the batch in one piece, with every list that a config could read, and the current logprobs."""
    generator = torch.Generator().manual_seed(1)
    count = SEQUENCES * LENGTH
    current_T = -torch.rand(count, generator=generator)
    noisy = [current_T + 0.1 * torch.randn(count, generator=generator) for _ in range(3)]
    lengths_N = torch.full((SEQUENCES,), LENGTH)
    tokens = Tokens(
        seq_T=torch.arange(SEQUENCES).repeat_interleave(lengths_N),
        length_N=lengths_N,
        trained_N=torch.ones(SEQUENCES, dtype=torch.bool),
        advantage_N=torch.tensor([completion.advantage for group in groups for completion in group.completions]),
        sampler_T=noisy[0],
        old_T=noisy[1],
        ref_T=noisy[2] if cfg.loss.kl_coef else None,
        entropy_T=torch.rand(count, generator=generator),
    )
    return tokens, current_T.requires_grad_()


def advantage_and_loss(groups: list[Group], cfg: Config) -> float:
    """CPU seconds of advantage, prepare, loss, its backward and metrics; the inputs are made off the clock."""
    started = time.process_time()
    assign(groups, cfg)
    spent = time.process_time() - started
    tokens, current_T = make_tokens(groups, cfg)
    started = time.process_time()
    prepare([[tokens]], cfg, lambda tensor: tensor)
    loss, measures = policy_loss(current_T, None, tokens, cfg)
    loss.backward()
    measures.result()
    return spent + time.process_time() - started


def make_forward() -> Callable[[], float]:
    """A function that gives the CPU seconds of one forward of the whole batch, from one sequence."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, config.vocab_size, (1, LENGTH))

    @torch.no_grad()
    def forward() -> float:
        started = time.process_time()
        model(ids)
        return (time.process_time() - started) * SEQUENCES

    forward()
    return forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that each side is measured")
    rounds = parser.parse_args().rounds
    groups, forward = make_groups(), make_forward()
    print(f"{SEQUENCES} sequences x {LENGTH} tokens, float32, {torch.get_num_threads()} threads, medians of {rounds}")
    for name, overrides in CONFIGS.items():
        cfg = load([*overrides, "trainer.epochs_per_step=2"], "plan").require()
        costs, forwards = [], []
        for _ in range(rounds):
            costs.append(advantage_and_loss(groups, cfg))
            forwards.append(forward())
        cost, whole = statistics.median(costs), statistics.median(forwards)
        print(f"{name:<32} {1000 * cost:7.1f} ms   forward {whole:7.1f} s   {cost / whole:.4%}")


if __name__ == "__main__":
    main()
