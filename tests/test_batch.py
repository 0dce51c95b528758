"""Packing: layout, balance over ranks, masks from lengths, and lists back on the completions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.batch import Sequence, lay_out, pack, split, trained_sequences, write_back
from grpo_cli.errors import RunError
from grpo_cli.process.ranks import Ranks
from grpo_cli.types import Completion, Group, Prompt
from tests import tiny

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, CPU)
PACKINGS = ("none", "sequence", "shared_prefix")


def completion(ids: list[int], finish: str = "stop", reward: float | None = 1.0) -> Completion:
    return Completion("", ids, finish, unshaped=reward, reward=reward, advantage=0.5)


def group(prompt: list[int], *completions: Completion) -> Group:
    return Group("1-0", Prompt("row", "", prompt, None), list(completions), 1, 0)


@pytest.mark.parametrize("packing", PACKINGS)
def test_tokens_are_those_of_the_lengths_whatever_their_values(packing):
    # B01: pad id = EOS id = 0, in the prompt, at the end of a completion, and where a row would be padded.
    one = group([0, 5], completion([5, 7, 0]), completion([5, 7, 8, 9, 6], "length"))
    batch = pack([one], tiny.config(f"trainer.packing={packing}"), ALONE)
    ((micro,),) = batch.updates
    got = {sequence.completion: [] for sequence in micro.sequences}
    for index, target in zip(micro.tokens.seq_T.tolist(), micro.targets_T.tolist(), strict=True):
        got[micro.sequences[index].completion].append(target)
    assert got == {0: [5, 7, 0], 1: [5, 7, 8, 9, 6]}
    assert micro.tokens.trained_N.all()
    # The predictor of a first token is the last of the prompt; of every other, the token before it.
    flat = micro.input_ids.flatten()
    predictors = flat[micro.source_T].tolist()
    assert sorted(predictors) == sorted([5, 5, 7, 5, 5, 7, 8, 9])
    # Positions continue from the prompt, which is two tokens long.
    positions = micro.position_ids.flatten()[micro.source_T].tolist()
    assert sorted(positions) == sorted([1, 2, 3, 1, 2, 3, 4, 5])


def test_shared_prefix_holds_the_prompt_once():
    one = group([1, 2, 3], completion([4]), completion([5, 6]))
    ((micro,),) = pack([one], tiny.config("trainer.packing=shared_prefix"), ALONE).updates
    assert micro.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert micro.source_T.tolist() == [2, 2, 4]


def test_what_cannot_be_trained_costs_no_pass():
    groups = [
        group([1], completion([2], reward=None), completion([]), completion([3], "length"), completion([4])),
        group([1], completion([2]), completion([3], reward=None)),
        group([1], completion([2])),
    ]
    found = trained_places(groups, "loss.mask_truncated=true", "rollout.max_new_tokens=64")
    # The second group has one scored completion and the third one completion: no baseline.
    assert found == [(0, 3)]
    assert trained_places(groups, "loss.mask_truncated=false") == [(0, 2), (0, 3)]
    # reinforce_pp compares inside no group: one completion by design is enough, one left over of two is not.
    alone = ("advantage=reinforce_pp", "filter=none", "advantage.normalize=none")
    assert trained_places(groups[1:], *alone) == [(1, 0)]


def trained_places(groups, *overrides):
    return [(s.group, s.completion) for s in trained_sequences(groups, tiny.config(*overrides))]


def test_updates_are_contiguous_and_even():
    sequences = [Sequence(0, i, 1, 1) for i in range(10)]
    parts = split(sequences, 4)
    assert [len(part) for part in parts] == [2, 3, 2, 3]
    assert [s for part in parts for s in part] == sequences
    assert split(sequences[:1], 3) == [[], [], sequences[:1]]


def test_nothing_to_train_is_an_empty_batch():
    batch = pack([], tiny.config("trainer.updates_per_step=3"), ALONE)
    assert batch.updates == [[], [], []]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=6),
    packing=st.sampled_from(PACKINGS),
    budget=st.integers(40, 200),
    world=st.integers(1, 4),
)
def test_every_sequence_once_and_as_many_passes_on_every_rank(lengths, packing, budget, world):
    sequences = [Sequence(g, i, 7 + g, length) for g, group in enumerate(lengths) for i, length in enumerate(group)]
    layout = lay_out(sequences, packing, budget, world)
    assert all(len(ranks) == world for ranks in layout)
    items = [item for ranks in layout for rank in ranks for item in rank]
    assert sorted((s.group, s.completion) for item in items for s in item.sequences) == sorted(
        (s.group, s.completion) for s in sequences
    )
    for ranks in layout:
        assert any(ranks), "a pass of dummies alone"
        for rank in ranks:
            rows = [item.cost for item in rank]
            assert (len(rows) * max(rows, default=0) if packing == "none" else sum(rows)) <= max(budget, 42)


def test_work_is_about_equal():
    draw = torch.Generator().manual_seed(0)
    sequences = [Sequence(i, 0, 20, int(torch.randint(1, 200, (), generator=draw))) for i in range(64)]
    for packing in PACKINGS:
        layout = lay_out(sequences, packing, 1024, 2)
        loads = [
            sum(
                len(rank) * max(i.cost for i in rank) if packing == "none" else sum(i.cost for i in rank) for rank in of
            )
            for of in zip(*layout, strict=True)
        ]
        assert max(loads) < 1.1 * min(loads), (packing, loads)


def test_few_groups_share_their_prompt_on_every_rank():
    sequences = [Sequence(0, i, 50, 10) for i in range(8)]
    ((first, second),) = lay_out(sequences, "shared_prefix", 4096, 2)
    assert [item.cost for item in first + second] == [90, 90]


def test_a_dummy_has_no_trained_token_and_no_sequence():
    cfg = tiny.config()
    one = group([1, 2], completion([3, 4]), completion([], reward=0.0))
    micro = pack([one], cfg, Ranks(1, 2, 1, CPU)).updates[0]
    assert len(micro) == 1
    assert micro[0].sequences == []
    assert not micro[0].tokens.trained_N.any()
    assert len(pack([one], cfg, Ranks(0, 2, 0, CPU)).updates[0]) == 1


@pytest.mark.parametrize("name", ["sampler_logprobs", "old_logprobs", "ref_logprobs"])
def test_a_list_of_another_length_is_an_error(name):
    one = group([1], completion([2, 3]), completion([4]))
    setattr(one.completions[0], name, [-1.0])
    with pytest.raises(RunError, match=rf"1-0, completion 0: {name} has 1 values for 2 tokens"):
        pack([one], tiny.config(), ALONE)


def test_a_missing_advantage_is_an_error():
    with pytest.raises(RunError, match="advantage"):
        pack([group([1], replace(completion([2]), advantage=None), completion([3]))], tiny.config(), ALONE)


@pytest.mark.parametrize("packing", PACKINGS)
def test_lists_come_back_to_their_completions(packing):
    groups = tiny.make_groups()
    batch = pack(groups, tiny.config(f"trainer.packing={packing}", "trainer.micro_batch_tokens=64"), ALONE)
    assert len(batch.micro_batches) > 1
    for micro in batch.micro_batches:
        micro.tokens.old_T = micro.targets_T.float()
    write_back(batch, ALONE)
    for group_ in groups:
        for answer in group_.completions:
            assert answer.old_logprobs == answer.token_ids
            assert answer.logprobs is None
            assert answer.ref_logprobs is None
