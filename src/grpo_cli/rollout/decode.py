"""The token loop over a transformers model: prompts prefilled once, caches expanded, finished rows taken out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from grpo_cli.model.weights import without_adapters
from grpo_cli.process.signals import stop
from grpo_cli.rollout.attention import grouped_decoding
from grpo_cli.rollout.draw import draw
from grpo_cli.rollout.sampling import Sampling

StopCheck = Callable[[Tensor], Tensor]
"""Generated tokens so far, [B, t] -> bool [B]: whether a stop string has just appeared."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion to be generated: completion `index` of prompt number `prompt`."""

    prompt: int
    index: int


@dataclass(slots=True)
class Decoded:
    """What one row became; `token_ids` ends with the EOS that ended it."""

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool
    """By an EOS or a stop string, not by the length limit."""


@dataclass(slots=True)
class _Alive:
    """The rows still being generated, and where they stand. B shrinks as rows finish."""

    row_B: Tensor
    """Their places in the output."""
    attended_BL: Tensor | None
    """Bool, True for real tokens among all cached and future ones; None where no prompt is padded."""
    position_B: Tensor
    """Position of the next token."""
    cache: DynamicCache
    logits_BV: Tensor
    """Of the next token."""

    def keep(self, index: Tensor) -> None:
        """Leave only the rows `index`; their caches move together."""
        self.row_B = self.row_B[index]
        self.position_B = self.position_B[index]
        if self.attended_BL is not None:
            self.attended_BL = self.attended_BL[index]
        self.cache.reorder_cache(cast(torch.LongTensor, index))


@torch.no_grad()
def decode(
    model: Any,
    prompts: list[list[int]],
    rows: list[Row],
    uniform_RT: Tensor | None,
    sampling: Sampling,
    eos_ids: frozenset[int],
    stop_check: StopCheck | None = None,
) -> list[Decoded]:
    """Generate `rows` from `prompts` in one batch.

    uniform_RT: float64 [rows, max_new_tokens], the random numbers of each row; None when greedy. Prompts are padded on
    the left; masks and positions come from their lengths, never from token values, so a pad id that equals the EOS id
    or stands in a prompt does no harm. Raises Interrupted, between two tokens, once a signal has come.
    """
    with evaluating(model), grouped_decoding(model):
        return _decode(model, prompts, rows, uniform_RT, sampling, eos_ids, stop_check)


def _decode(
    model: Any,
    prompts: list[list[int]],
    rows: list[Row],
    uniform_RT: Tensor | None,
    sampling: Sampling,
    eos_ids: frozenset[int],
    stop_check: StopCheck | None,
) -> list[Decoded]:
    alive = _prefill(model, prompts, rows, sampling.max_new_tokens)
    device = alive.row_B.device
    tokens_RT = torch.zeros(len(rows), sampling.max_new_tokens, dtype=torch.long, device=device)
    logprobs_RT = torch.zeros(len(rows), sampling.max_new_tokens, dtype=torch.float32, device=device)
    length_R = torch.full((len(rows),), sampling.max_new_tokens, device=device)
    stopped_R = torch.zeros(len(rows), dtype=torch.bool, device=device)
    uniform_RT = None if uniform_RT is None else uniform_RT.to(device)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
    for t in range(sampling.max_new_tokens):
        stop.check()
        uniform_B = None if uniform_RT is None else uniform_RT[alive.row_B, t]
        token_B, logprob_B = draw(alive.logits_BV, uniform_B, sampling)
        tokens_RT[alive.row_B, t] = token_B
        logprobs_RT[alive.row_B, t] = logprob_B
        ended_B = torch.isin(token_B, eos)
        if stop_check is not None:
            ended_B |= stop_check(tokens_RT[alive.row_B, : t + 1]).to(device)
        ended_R = alive.row_B[ended_B]
        length_R[ended_R] = t + 1
        stopped_R[ended_R] = True
        index = (~ended_B).nonzero().squeeze(1)
        if len(index) == 0 or t + 1 == sampling.max_new_tokens:
            break
        if len(index) < len(token_B):
            alive.keep(index)
            token_B = token_B[index]
        _advance(model, alive, token_B)
    return list(_collect(tokens_RT, logprobs_RT, length_R, stopped_R))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode inside: in training mode, layers under gradient checkpointing throw the cache away unasked."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _prefill(model: Any, prompts: list[list[int]], rows: list[Row], max_new_tokens: int) -> _Alive:
    """Run each prompt once, then give each of its rows a copy of its cache and of its last logits.

    What all prompts begin with (a chat template, a system prompt, examples) is run a single time before that.
    """
    device = next(model.parameters()).device
    cache = DynamicCache(config=model.config)
    shared = _run_shared(model, prompts, cache)
    rests = [prompt[shared:] for prompt in prompts]
    length_P = torch.tensor([len(rest) for rest in rests], device=device)
    longest = int(length_P.max())
    padded = [[0] * (longest - len(rest)) + rest for rest in rests]
    ids_PL = torch.tensor(padded, dtype=torch.long, device=device)
    column_L = torch.arange(shared + longest + max_new_tokens, device=device) - shared
    pads_P1 = (longest - length_P).unsqueeze(1)
    attended_PL = None
    if not bool((length_P == longest).all()):
        attended_PL = (column_L < 0) | (column_L >= pads_P1)
    position_PL = shared + (column_L[shared : shared + longest] - pads_P1).clamp(min=0)
    mask_PL = None if attended_PL is None else attended_PL[:, : shared + longest]
    logits_PV = _forward(model, ids_PL, mask_PL, position_PL, cache)
    prompt_R = torch.tensor([row.prompt for row in rows], device=device)
    cache.reorder_cache(cast(torch.LongTensor, prompt_R))
    return _Alive(
        row_B=torch.arange(len(rows), device=device),
        attended_BL=None if attended_PL is None else attended_PL[prompt_R],
        position_B=shared + length_P[prompt_R],
        cache=cache,
        logits_BV=logits_PV[prompt_R],
    )


def _run_shared(model: Any, prompts: list[list[int]], cache: DynamicCache) -> int:
    """Run the tokens that all prompts begin with, once; the cache then has them for each prompt. Returns how many.

    At least the last token of every prompt is left. Layers whose cache is a window or a state count columns, and the
    padding behind the shared tokens would count with them: for those, nothing is shared.
    """
    if len(prompts) == 1 or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return 0
    first, last = min(prompts), max(prompts)  # whatever these two share, those between them share too
    limit = min(len(prompt) for prompt in prompts) - 1
    shared = next((t for t in range(limit) if first[t] != last[t]), limit)
    if shared:
        device = next(model.parameters()).device
        position_1L = torch.arange(shared, device=device).unsqueeze(0)
        _forward(model, torch.tensor([first[:shared]], device=device), None, position_1L, cache)
        cache.reorder_cache(cast(torch.LongTensor, torch.zeros(len(prompts), dtype=torch.long, device=device)))
    return shared


def _advance(model: Any, alive: _Alive, token_B: Tensor) -> None:
    """Run the newest token of every row and keep the logits of the one after it."""
    cached = alive.cache.get_seq_length()
    mask_BL = None if alive.attended_BL is None else alive.attended_BL[:, : cached + 1]
    alive.logits_BV = _forward(model, token_B.unsqueeze(1), mask_BL, alive.position_B.unsqueeze(1), alive.cache)
    alive.position_B = alive.position_B + 1


@torch.no_grad()
def score(model: Any, prompt_ids: list[int], completion_ids: list[int], temperature: float) -> list[float]:
    """Logprobs of the completion's tokens after temperature, in float32, from one plain forward.

    Not through a cache: in bfloat16 its other kernels alone move a logprob by 0.1, as much as stale weights do.
    """
    device = next(model.parameters()).device
    tokens = len(completion_ids)
    ids_1L = torch.tensor([(prompt_ids + completion_ids)[:-1]], device=device)  # nobody asks what follows the last one
    with evaluating(model):
        output = model(input_ids=ids_1L, use_cache=False, **last_logits(model, tokens))
    logprobs_TV = torch.log_softmax(output.logits[0, -tokens:].float() / temperature, dim=-1)
    return logprobs_TV.gather(1, torch.tensor(completion_ids, device=device)[:, None]).squeeze(1).tolist()


@contextmanager
def layers_once(model: Any) -> Iterator[None]:
    """Inside, the layers of `model` (all but the output head) run once for the same tokens and the same tensors.

    A second call gets what the first one gave, where every weight lies in the same memory; under ZeRO-3 none does. The
    calls must be plain ones of a single row, and nothing may write to the weights in between.
    """
    causal_lm = without_adapters(model)
    decoder = getattr(causal_lm, causal_lm.base_model_prefix)
    run = decoder.forward
    outputs: dict[tuple[int, ...], Any] = {}

    def forward(input_ids: Tensor, *others: Any, **named: Any) -> Any:
        key = (*input_ids.flatten().tolist(), *(weight.data_ptr() for weight in decoder.parameters()))
        if key not in outputs:
            outputs[key] = run(input_ids, *others, **named)
        return outputs[key]

    decoder.forward = forward
    try:
        yield
    finally:
        del decoder.forward


def _forward(model: Any, ids_BL: Tensor, mask_BL: Tensor | None, position_BL: Tensor, cache: DynamicCache) -> Tensor:
    """Logits [B, V] after the last column; the cache grows by the columns of `ids_BL`."""
    output = model(
        input_ids=ids_BL,
        attention_mask=mask_BL,
        position_ids=position_BL,
        past_key_values=cache,
        use_cache=True,
        **last_logits(model, 1),
    )
    return output.logits[:, -1]


def last_logits(model: Any, positions: int) -> dict[str, int]:
    """Arguments by which the model leaves out the logits of all but the last `positions`; none where it cannot."""
    takes = "logits_to_keep" in inspect.signature(without_adapters(model).forward).parameters
    return {"logits_to_keep": positions} if takes else {}


def _collect(tokens_RT: Tensor, logprobs_RT: Tensor, length_R: Tensor, stopped_R: Tensor) -> Iterator[Decoded]:
    columns = zip(tokens_RT.tolist(), logprobs_RT.tolist(), length_R.tolist(), stopped_R.tolist(), strict=True)
    for tokens, logprobs, length, stopped in columns:
        yield Decoded(token_ids=tokens[:length], logprobs=logprobs[:length], stopped=stopped)


def plan_batches(prompt_lengths: list[int], samples: int, max_new_tokens: int, budget_tokens: int) -> list[list[Row]]:
    """Deal all completions into batches whose padded size, prompt and completion, stays within `budget_tokens`.

    Prompts of like length share a batch (little padding); a group is split only where it alone is over the budget, and
    a batch has at least one row. Depends on nothing but its arguments, so a resumed run makes the same batches.
    """
    batches: list[list[Row]] = []
    for prompt in sorted(range(len(prompt_lengths)), key=lambda number: (prompt_lengths[number], number)):
        capacity = max(1, budget_tokens // (prompt_lengths[prompt] + max_new_tokens))
        rows = [Row(prompt, index) for index in range(samples)]
        if batches and len(batches[-1]) + samples <= capacity:
            batches[-1].extend(rows)
        else:
            batches.extend(rows[start : start + capacity] for start in range(0, samples, capacity))
    return batches
