"""From kept groups to token tensors: optimizer updates, micro-batches, and equal work for every rank.

Everything here is a pure function of the groups, and every rank holds all groups of a step: so each rank works out the
same layout of all ranks without a message, and takes its own part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_cli.errors import RunError
from grpo_cli.loss import Tokens
from grpo_cli.masks import trained
from grpo_cli.model.attention import Plan, Span, make_plan
from grpo_cli.process.ranks import Ranks
from grpo_cli.types import Completion, Group


@dataclass(frozen=True, slots=True)
class Sequence:
    """One trained completion behind its prompt."""

    group: int
    """Index of its group among the kept ones."""
    completion: int
    """Index within the group."""
    prompt: int
    """Prompt length in tokens."""
    length: int
    """Completion length in tokens, at least one."""


@dataclass(frozen=True, slots=True)
class Item:
    """Sequences that stay in one micro-batch: one, or several that share one copy of their prompt."""

    sequences: tuple[Sequence, ...]

    @property
    def cost(self) -> int:
        """Tokens of a packed row."""
        return self.sequences[0].prompt + sum(sequence.length for sequence in self.sequences)


@dataclass(slots=True)
class MicroBatch:
    """One forward pass of one rank: R rows of L tokens, of which T belong to completions."""

    input_ids: Tensor
    """[R, L] long; rows are padded on the right, where nothing reads."""
    position_ids: Tensor
    """[R, L] long, counted from each sequence's own start, whatever lies before it in the row."""
    spans: list[Span] | None
    """What a packed row (R = 1) holds; None: one sequence a row, plainly causal."""
    plan: Plan | None
    """The attention of that packed row."""
    source_T: Tensor
    """[T] long, index into the R·L tokens of the one whose logits predict each completion token."""
    targets_T: Tensor
    """[T] long, the completion tokens themselves."""
    tokens: Tokens
    sequences: list[Sequence]
    """Which completion each of the N sequences is; empty for a dummy, which only takes part in collectives."""
    logprobs_T: Tensor | None = None
    """[T] float32 of the current policy at the first update of the step, for the rollout dump."""
    entropy_T: Tensor | None = None
    """[T] float32, nats, of the same forward, for the same purpose."""

    @property
    def size(self) -> int:
        """Tokens, padding included."""
        return self.input_ids.numel()


@dataclass(slots=True)
class Batch:
    """A step's work of this rank: micro-batches of each optimizer update, as many on every rank."""

    groups: list[Group]
    updates: list[list[MicroBatch]]

    @property
    def tokens(self) -> list[list[Tokens]]:
        """What `loss.prepare` reads."""
        return [[micro.tokens for micro in update] for update in self.updates]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro for update in self.updates for micro in update]


def pack(kept: list[Group], cfg: Any, ranks: Ranks) -> Batch:
    """The batch of this rank: U contiguous minibatches of the trained completions, laid out as `trainer.packing` says.

    Completions that no configuration of the step trains on (unscored, without a token, cut off under
    `loss.mask_truncated`) cost no forward pass. Raises RunError where a list is not as long as its tokens.
    """
    _check_lengths(kept)
    trainer = cfg.trainer
    with_sampler = all(c.sampler_logprobs is not None for group in kept for c in group.completions)
    updates = []
    for sequences in split(trained_sequences(kept, cfg), trainer.updates_per_step):
        layout = lay_out(sequences, trainer.packing, trainer.micro_batch_tokens, ranks.world)
        updates.append(
            [_micro_batch(rows[ranks.rank], kept, trainer.packing, with_sampler, ranks.device) for rows in layout]
        )
    return Batch(kept, updates)


def trained_sequences(kept: list[Group], cfg: Any) -> list[Sequence]:
    """The completions that can be trained on, in the order of the step."""
    return [
        Sequence(g, i, len(group.prompt.token_ids), len(completion.token_ids))
        for g, group in enumerate(kept)
        for i, (completion, is_trained) in enumerate(zip(group.completions, trained(group, cfg), strict=True))
        if is_trained and completion.token_ids
    ]


def split(sequences: list[Sequence], parts: int) -> list[list[Sequence]]:
    """Contiguous parts whose sizes differ by at most one; some are empty where there are too few sequences."""
    count = len(sequences)
    return [sequences[count * part // parts : count * (part + 1) // parts] for part in range(parts)]


def lay_out(sequences: list[Sequence], packing: str, budget: int, world: int) -> list[list[list[Item]]]:
    """Micro-batches of one update, each the items of every rank: at most `budget` tokens a rank, about equal work.

    A rank may get an empty list (a dummy), so that all ranks run as many passes. No sequences: no micro-batches.
    """
    if not sequences:
        return []
    if packing == "none":
        bins = _padded_bins(sequences, budget, world)
    else:
        bins = _packed_bins(_items(sequences, packing, budget, world), budget, world)
    bins += [[]] * (-len(bins) % world)
    rounds = [bins[first : first + world] for first in range(0, len(bins), world)]
    # Heaviest first within a round; every other round turns round, so that no rank is always the heaviest.
    return [ranks[:: 1 if number % 2 == 0 else -1] for number, ranks in enumerate(rounds)]


def _items(sequences: list[Sequence], packing: str, budget: int, world: int) -> list[Item]:
    if packing == "sequence":
        return [Item((sequence,)) for sequence in sequences]
    groups: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.group, []).append(sequence)
    # Fewer groups than ranks: a prompt is computed on several of them rather than leaving some idle.
    parts = -(-world // len(groups))
    return [
        item
        for group in groups.values()
        for part in split(group, min(parts, len(group)))
        for item in _shared(part, budget)
    ]


def _shared(sequences: list[Sequence], budget: int) -> list[Item]:
    """Sequences of one prompt, cut where prompt and completions would exceed the budget."""
    items: list[Item] = []
    chunk: list[Sequence] = []
    for sequence in sequences:
        if chunk and Item((*chunk, sequence)).cost > budget:
            items.append(Item(tuple(chunk)))
            chunk = []
        chunk.append(sequence)
    return [*items, Item(tuple(chunk))]


def _packed_bins(items: list[Item], budget: int, world: int) -> list[list[Item]]:
    """As few bins as the budget allows, a multiple of `world`, filled longest first into the emptiest."""
    longest_first = sorted(items, key=lambda item: -item.cost)
    rounds = max(1, -(-sum(item.cost for item in items) // (budget * world)))
    while (bins := _fill(longest_first, rounds * world, budget)) is None:
        rounds += 1
    return sorted(bins, key=lambda items: -sum(item.cost for item in items))


def _fill(items: list[Item], count: int, budget: int) -> list[list[Item]] | None:
    """`count` bins, or None where an item fits none of them; an item alone always fits."""
    bins: list[list[Item]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in items:
        emptiest = min(range(count), key=loads.__getitem__)
        if loads[emptiest] and loads[emptiest] + item.cost > budget:
            return None
        bins[emptiest].append(item)
        loads[emptiest] += item.cost
    return bins


def _padded_bins(sequences: list[Sequence], budget: int, world: int) -> list[list[Item]]:
    """Rows of like length, padded to the longest of the bin: rows times length stays within the budget.

    As many bins as the budget needs, up to a multiple of `world`; then the smallest budget that needs no more.
    """
    longest_first = [Item((s,)) for s in sorted(sequences, key=lambda s: -(s.prompt + s.length))]
    count = len(_pad(longest_first, budget))
    count = min(len(longest_first), count + -count % world)
    low, high = longest_first[0].cost, max(budget, longest_first[0].cost)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_pad(longest_first, middle)) <= count else (middle + 1, high)
    bins = _pad(longest_first, low)
    return sorted(bins, key=lambda items: -(len(items) * items[0].cost))


def _pad(longest_first: list[Item], budget: int) -> list[list[Item]]:
    bins: list[list[Item]] = []
    for item in longest_first:
        if not bins or (len(bins[-1]) + 1) * bins[-1][0].cost > budget:
            bins.append([])
        bins[-1].append(item)
    return bins


def _micro_batch(
    items: list[Item], kept: list[Group], packing: str, with_sampler: bool, device: torch.device
) -> MicroBatch:
    if not items:
        return _dummy(with_sampler, device)
    sequences = [sequence for item in items for sequence in item.sequences]
    completions = [kept[sequence.group].completions[sequence.completion] for sequence in sequences]
    rows = _padded_rows(items, kept) if packing == "none" else _packed_row(items, kept)
    targets_T = torch.tensor([token for completion in completions for token in completion.token_ids])
    return MicroBatch(
        input_ids=rows.input_ids.to(device),
        position_ids=rows.position_ids.to(device),
        spans=rows.spans,
        plan=make_plan(rows.spans).to(device) if rows.spans is not None else None,
        source_T=torch.cat(rows.sources).to(device),
        targets_T=targets_T.to(device),
        tokens=_tokens(completions, with_sampler, device),
        sequences=sequences,
    )


@dataclass(slots=True)
class _Rows:
    """Ids and positions of a micro-batch, its spans, and the index of each completion token's predictor."""

    input_ids: Tensor
    position_ids: Tensor
    spans: list[Span] | None
    sources: list[Tensor]


def _padded_rows(items: list[Item], kept: list[Group]) -> _Rows:
    width = max(item.cost for item in items)
    input_ids = torch.zeros(len(items), width, dtype=torch.long)
    sources = []
    for row, item in enumerate(items):
        (sequence,) = item.sequences
        ids = kept[sequence.group].prompt.token_ids + kept[sequence.group].completions[sequence.completion].token_ids
        input_ids[row, : len(ids)] = torch.tensor(ids)
        first = row * width + sequence.prompt - 1
        sources.append(torch.arange(first, first + sequence.length))
    return _Rows(input_ids, torch.arange(width).expand(len(items), width).contiguous(), None, sources)


def _packed_row(items: list[Item], kept: list[Group]) -> _Rows:
    ids: list[int] = []
    positions: list[Tensor] = []
    spans: list[Span] = []
    sources: list[Tensor] = []
    for item in items:
        group, prompt = kept[item.sequences[0].group], item.sequences[0].prompt
        prompt_start = len(ids)
        ids += group.prompt.token_ids
        if len(item.sequences) > 1:
            spans.append(Span(prompt_start, prompt))
            positions.append(torch.arange(prompt))
        for sequence in item.sequences:
            start = len(ids)
            ids += group.completions[sequence.completion].token_ids
            if len(item.sequences) > 1:
                spans.append(Span(start, sequence.length, prompt_start, prompt))
                positions.append(torch.arange(prompt, prompt + sequence.length))
            else:
                spans.append(Span(prompt_start, prompt + sequence.length))
                positions.append(torch.arange(prompt + sequence.length))
            source = torch.arange(start - 1, start - 1 + sequence.length)
            source[0] = prompt_start + prompt - 1
            sources.append(source)
    return _Rows(torch.tensor([ids]), torch.cat(positions)[None], spans, sources)


def _tokens(completions: list[Completion], with_sampler: bool, device: torch.device) -> Tokens:
    length_N = torch.tensor([len(completion.token_ids) for completion in completions])
    sampler = [value for completion in completions for value in completion.sampler_logprobs or []]
    return Tokens(
        seq_T=torch.arange(len(completions)).repeat_interleave(length_N).to(device),
        length_N=length_N.to(device),
        trained_N=torch.ones(len(completions), dtype=torch.bool, device=device),
        advantage_N=torch.tensor([_advantage(completion) for completion in completions], device=device),
        sampler_T=torch.tensor(sampler, device=device) if with_sampler else None,
    )


def _advantage(completion: Completion) -> float:
    if completion.advantage is None:
        raise RunError("A completion came to training without an advantage.")
    return float(completion.advantage)


def _dummy(with_sampler: bool, device: torch.device) -> MicroBatch:
    """One untrained token behind one token: takes part in forward and backward with weight 0."""
    completion = Completion("", [0], "stop", advantage=0.0, sampler_logprobs=[0.0])
    tokens = _tokens([completion], with_sampler, device)
    tokens.trained_N = torch.zeros_like(tokens.trained_N)
    return MicroBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
        position_ids=torch.arange(2, device=device)[None],
        spans=None,
        plan=None,
        source_T=torch.zeros(1, dtype=torch.long, device=device),
        targets_T=torch.zeros(1, dtype=torch.long, device=device),
        tokens=tokens,
        sequences=[],
    )


def _check_lengths(kept: list[Group]) -> None:
    for group in kept:
        for index, completion in enumerate(group.completions):
            for name in ("sampler_logprobs", "old_logprobs", "ref_logprobs"):
                values = getattr(completion, name)
                if values is not None and len(values) != len(completion.token_ids):
                    raise RunError(
                        f"Group {group.group_id}, completion {index}: {name} has {len(values)} values "
                        f"for {len(completion.token_ids)} tokens."
                    )


def write_back(batch: Batch, ranks: Ranks) -> None:
    """Put the computed logprobs and entropies of all ranks on the completions of every rank, for the rollout dump."""
    mine: dict[tuple[int, int], dict[str, list[float]]] = {}
    for micro in batch.micro_batches:
        computed = {
            "logprobs": micro.logprobs_T,
            "old_logprobs": micro.tokens.old_T,
            "ref_logprobs": micro.tokens.ref_T,
            "entropies": micro.entropy_T if micro.tokens.entropy_T is None else micro.tokens.entropy_T,
        }
        for name, values_T in computed.items():
            if values_T is None:
                continue
            values, start = values_T.tolist(), 0
            for sequence in micro.sequences:
                lists = mine.setdefault((sequence.group, sequence.completion), {})
                lists[name] = values[start : start + sequence.length]
                start += sequence.length
    for part in ranks.gather(mine):
        for (group, index), lists in part.items():
            for name, values in lists.items():
                setattr(batch.groups[group].completions[index], name, values)
