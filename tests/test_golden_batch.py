"""The golden cases through the trainer's own path: packed, split into micro-batches, in float32.

`grpo replay` shows the same cases in float64 without a batch; here the layout must not show in loss or gradient.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from grpo_cli import advantage
from grpo_cli.batch import MicroBatch, pack
from grpo_cli.compose import load
from grpo_cli.filter import make_filter
from grpo_cli.loss import policy_loss, prepare
from grpo_cli.passes import decide_passes
from grpo_cli.process.ranks import Ranks
from grpo_cli.replay.dump import Row, parse_groups, term_names
from grpo_cli.schema import Config
from grpo_cli.shaping import shape
from grpo_cli.types import Completion, Group

CASES = json.loads((Path(__file__).parent / "data" / "golden_cases.json").read_text())
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def lists(micro: MicroBatch, kept: list[Group], name: str) -> torch.Tensor | None:
    """[T] float32 of a stored list; the current logprobs stand in where a needed old one is missing."""
    values: list[float] = []
    for sequence in micro.sequences:
        completion: Completion = kept[sequence.group].completions[sequence.completion]
        stored = getattr(completion, name)
        if stored is None and name == "ref_logprobs":
            return None
        values += next(
            v
            for v in (stored, completion.logprobs, completion.old_logprobs, completion.sampler_logprobs)
            if v is not None
        )
    return torch.tensor(values)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_layout_does_not_show(case):
    overrides = [*case["overrides"], "trainer.micro_batch_tokens=12"]
    rows = [Row(str(index), copy.deepcopy(group)) for index, group in enumerate(case["groups"])]
    cfg = load(overrides, "replay", None, terms=term_names(rows)).config
    groups = parse_groups(rows)
    weights = {name: (cfg.replay.weights or {}).get(name, 1.0) for name in term_names(rows)}
    for completion in (c for group in groups for c in group.completions):
        shape(completion, weights, cfg.reward.overlong)
        completion.advantage = 0.0
    kept, _ = make_filter(cfg).split(groups)
    advantage.assign(kept, cfg, weights)
    for packing in ("none", "sequence", "shared_prefix"):
        trainer = cfg.trainer.model_copy(update={"packing": packing})
        check(case["expect"], groups, kept, cfg.model_copy(update={"trainer": trainer}))


def check(expect: dict, groups: list[Group], kept: list[Group], cfg: Config) -> None:
    batch = pack(kept, cfg, ALONE)
    passes = decide_passes(cfg)
    for micro in batch.micro_batches:
        if passes.old.runs:
            micro.tokens.old_T = lists(micro, kept, "old_logprobs")
        if passes.reference.runs:
            micro.tokens.ref_T = lists(micro, kept, "ref_logprobs")
    if batch.micro_batches:
        prepare(batch.tokens, cfg, ALONE.sum)
    grad = [[[0.0] * len(c.token_ids) for c in group.completions] for group in groups]
    position = {id(group): index for index, group in enumerate(groups)}
    loss = 0.0
    for micro in batch.micro_batches:
        logprobs_T = lists(micro, kept, "logprobs").requires_grad_()
        share, _ = policy_loss(logprobs_T, None, micro.tokens, cfg)
        share.backward()
        loss += share.item()
        for index, sequence in enumerate(micro.sequences):
            values = logprobs_T.grad[micro.tokens.seq_T == index].tolist()
            grad[position[id(kept[sequence.group])]][sequence.completion] = values
    assert loss == pytest.approx(expect["loss"], rel=1e-4, abs=1e-5)
    for got, expected in zip(grad, expect["token_grad"], strict=True):
        for mine, theirs in zip(got, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
