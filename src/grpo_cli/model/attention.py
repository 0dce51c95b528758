"""Attention among packed sequences: nobody reads a neighbour, and nobody pays for one.

A packed row holds spans of tokens end to end. With a dense mask its attention would cost the square of the whole row;
here the spans are gathered into batches of about equal length, attended there, and put back: linear layers see no
padding, and attention costs the sum of the squares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IMPLEMENTATION = "grpo_sdpa"
"""Name under which transformers knows the packed form of its sdpa attention."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `start + length` of a packed row; causal among themselves, and after all of the prefix.

    A sequence is one span without a prefix. With a shared prefix the prompt is one, and each completion another:

    >>> Span(start=5, length=3, prefix_start=0, prefix_length=5)
    Span(start=5, length=3, prefix_start=0, prefix_length=5)
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One batched attention: R spans, padded to Q queries and K keys (their prefixes first)."""

    query_RQ: Tensor
    """[R, Q] long, index into the packed row; padding repeats the span's first token."""
    key_RK: Tensor
    """[R, K] long, index into the packed row."""
    mask: Tensor | None
    """[R, 1, Q, K] bool, True where a query reads a key; None: plainly causal and Q = K."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the attention of one packed row is computed."""

    calls: list[Call]
    result_L: Tensor
    """[L] long: where the calls' outputs, end to end, hold each token of the row."""

    def to(self, device: torch.device) -> Plan:
        """The same plan on `device`."""
        calls = [
            Call(c.query_RQ.to(device), c.key_RK.to(device), None if c.mask is None else c.mask.to(device))
            for c in self.calls
        ]
        return Plan(calls, self.result_L.to(device))


def make_plan(spans: list[Span]) -> Plan:
    """The plan of a packed row that `spans` cover without gap or overlap. Spans of like length share a call."""
    buckets: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        buckets.setdefault((span.length.bit_length(), span.prefix_length.bit_length()), []).append(span)
    calls = [_call(bucket) for bucket in buckets.values()]
    result_L = torch.zeros(sum(span.length for span in spans), dtype=torch.long)
    offset = 0
    for call, bucket in zip(calls, buckets.values(), strict=True):
        width = call.query_RQ.shape[1]
        for row, span in enumerate(bucket):
            first = offset + row * width
            result_L[span.start : span.start + span.length] = torch.arange(first, first + span.length)
        offset += call.query_RQ.numel()
    return Plan(calls, result_L)


def _call(spans: list[Span]) -> Call:
    start_R = torch.tensor([span.start for span in spans])
    length_R = torch.tensor([span.length for span in spans])
    column_Q = torch.arange(int(length_R.max()))
    own_RQ = start_R[:, None] + torch.where(column_Q < length_R[:, None], column_Q, 0)
    prefix_start_R = torch.tensor([span.prefix_start for span in spans])
    prefix_length_R = torch.tensor([span.prefix_length for span in spans])
    width = int(prefix_length_R.max())
    if width == 0:
        return Call(own_RQ, own_RQ, None)
    column_P = torch.arange(width)
    inside_RP = column_P < prefix_length_R[:, None]
    prefix_RP = prefix_start_R[:, None] + torch.where(inside_RP, column_P, 0)
    causal_QQ = column_Q[None, :] <= column_Q[:, None]
    rows, queries = own_RQ.shape
    mask = torch.cat(
        [inside_RP[:, None, :].expand(rows, queries, width), causal_QQ[None].expand(rows, queries, queries)], dim=-1
    )
    return Call(own_RQ, torch.cat([prefix_RP, own_RQ], dim=-1), mask[:, None])


def dense_mask(spans: list[Span], window: int | None = None) -> Tensor:
    """The same attention as one [1, 1, L, L] bool mask, for kernels that take nothing else.

    With `window`: of a layer that reads only the last `window` positions of a sequence.
    """
    length = sum(span.length for span in spans)
    mask = torch.zeros(length, length, dtype=torch.bool)
    for span in spans:
        own = slice(span.start, span.start + span.length)
        mask[own, own] = torch.ones(span.length, span.length, dtype=torch.bool).tril()
        mask[own, span.prefix_start : span.prefix_start + span.prefix_length] = True
    if window is not None and any(span.prefix_length + span.length > window for span in spans):
        mask = _narrowed(mask, window)
    return mask[None, None]


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; without a plan it is their sdpa attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Plan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, call by call of the plan.

    query [1, heads, L, d], key and value [1, kv heads, L, d]; returns [1, L, heads, d] like every attention there.
    """
    if packing is None:
        return _attend(module, query, key, value, attention_mask, **kwargs), None
    query_L, key_L, value_L = (states[0].transpose(0, 1) for states in (query, key, value))
    outputs = []
    for call in packing.calls:
        output = _attend(
            module,
            query_L[call.query_RQ].transpose(1, 2),
            key_L[call.key_RK].transpose(1, 2),
            value_L[call.key_RK].transpose(1, 2),
            _mask(call, kwargs.get("sliding_window")),
            **kwargs,
        )
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[packing.result_L][None], None


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16 and query.shape[2] > 1:
        # torch's CPU kernel takes 2.7 times as long in bfloat16 for spans of 70 tokens (42.6 against 15.7 ms, forward
        # and backward), and as long for 512. One query at a time (decoding) would only pay for the conversion.
        query, key, value = query.float(), key.float(), value.float()
    output, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    return output.to(dtype)


def _mask(call: Call, window: int | None) -> Tensor | None:
    """The call's mask, narrowed where the layer reads only the last `window` positions."""
    queries, keys = call.query_RQ.shape[1], call.key_RK.shape[1]
    if window is None or keys <= window:
        return call.mask
    if call.mask is not None:
        return _narrowed(call.mask, window)
    causal = torch.ones(queries, keys, dtype=torch.bool, device=call.query_RQ.device).tril()
    return _narrowed(causal, window)[None, None]


def _narrowed(mask: Tensor, window: int) -> Tensor:
    """`mask` [..., Q, K] bool, of which each query reads only the last `window` keys."""
    # Keys that a query reads are its prefix and then its own span: their order is their distance.
    order = mask.cumsum(-1, dtype=torch.int32)
    return mask & (order > order[..., -1:] - window)
