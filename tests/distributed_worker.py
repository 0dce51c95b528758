"""What each process of the distributed tests runs: python -m tests.distributed_worker MODEL OUT SCENARIO...

A scenario is overrides joined by blanks; rank 0 writes what `run` returns for each of them to OUT, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_cli.batch import pack, write_back
from grpo_cli.process import ranks
from grpo_cli.process.ranks import Ranks
from grpo_cli.trainer.policy import Policy
from grpo_cli.types import Group
from tests import tiny

STEPS = 3


def steps() -> list[list[Group]]:
    """Kept groups of three steps: uneven ones, interleaved ones with a group dropped, and a single trained completion.

    The last leaves all ranks but one without a token.
    """
    first = tiny.make_groups(count=3, generations=4, seed=1)
    second = [group for group in tiny.make_groups(count=4, generations=4, seed=2) if group.group_id != "1-1"][::-1]
    third = tiny.make_groups(count=1, generations=3, seed=3)
    for completion in third[0].completions[1:]:
        completion.finish_reason = "length"
    return [first, second, third]


def run(policy: Policy) -> dict[str, Any]:
    """Metrics of each step, micro-batches of each step, and what is left of every parameter after the last."""
    rows, passes = [], []
    for number, groups in enumerate(steps(), start=1):
        batch = pack(groups, policy.cfg, policy.ranks)
        metrics = policy.add_logprobs(batch) | policy.update(batch, number)
        write_back(batch, policy.ranks)
        metrics = {key: value for key, value in metrics.items() if not key.startswith(("time/", "update/"))}
        logprobs = [value for g in groups for c in g.completions for value in c.logprobs or []]
        rows.append(metrics | {"logprobs": logprobs})
        passes.append(policy.ranks.gather([len(update) for update in batch.updates]))
    refused = refuse(policy)
    weights = {name: tensor.float().norm().item() for name, tensor in policy.gathered_parameters()}
    return {
        "rows": rows,
        "passes": passes,
        "weights": weights,
        "generation": generate(policy),
        "score": score(policy),
    } | refused


def refuse(policy: Policy) -> dict[str, Any]:
    """A step that has a NaN on the first rank alone: what it counts, and whether any weight moved."""
    before = [tensor.clone() for _, tensor in policy.gathered_parameters()]
    batch = pack(steps()[0], policy.cfg, policy.ranks)
    policy.add_logprobs(batch)
    if policy.ranks.first:
        for micro in batch.updates[0]:
            micro.tokens.advantage_N[:] = float("nan")
    batch.updates = batch.updates[:1]
    whole = policy.cfg
    policy.cfg = whole.model_copy(update={"trainer": whole.trainer.model_copy(update={"updates_per_step": 1})})
    metrics = policy.update(batch, STEPS + 1)
    policy.cfg = whole
    same = all(torch.equal(old, new) for old, (_, new) in zip(before, policy.gathered_parameters(), strict=True))
    return {"refused": policy.ranks.gather(metrics["updates/nonfinite_count"]), "unmoved": policy.ranks.gather(same)}


def generate(policy: Policy) -> float:
    """Logprob of one token by the bare model, inside `generation()`; each rank makes another number of passes."""
    with policy.generation() as lm:
        for _ in range(3 * policy.ranks.rank + 1):
            logits = lm(input_ids=torch.tensor([[5, 6, 7]])).logits[0, 1].float() / policy.cfg.rollout.temperature
    return logits.log_softmax(-1)[7].item()


def score(policy: Policy) -> float:
    """The same logprob by `score`."""
    return policy.score([5, 6], [7, 8])[0]


def overrides(scenario: str) -> list[str]:
    return [
        "loss.mask_truncated=true",
        "trainer.updates_per_step=2",
        "rollout.temperature=0.7",
        "trainer.lr=1e-3",
        *scenario.split(),
    ]


def main(model: str, out: str, *scenarios: str) -> None:
    processes: Ranks = ranks.start(timeout_s=60)
    results = {}
    for scenario in scenarios:
        cfg = tiny.config(f"model.path={model}", *overrides(scenario))
        results[scenario] = run(Policy(cfg, processes))
    if processes.first:
        Path(out).write_text(json.dumps(results))
    processes.barrier()
    ranks.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
