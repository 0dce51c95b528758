"""Packed attention equals a dense mask, and a dense mask equals each sequence alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from grpo_cli.model.attention import Span, dense_mask, make_plan, packed_attention

# A sequence, a prompt, three completions of it, another sequence, another prompt and a completion of it.
PROMPT = [Span(5, 4), Span(9, 3, 5, 4), Span(12, 1, 5, 4), Span(13, 17, 5, 4)]
SPANS = [Span(0, 5), *PROMPT, Span(30, 2), Span(32, 5), Span(37, 3, 32, 5)]
LENGTH = 40


class Layer(torch.nn.Module):
    """What transformers' attention reads of a layer: two query heads share one key head."""

    num_key_value_groups = 2
    is_causal = True


def states(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    query = torch.randn(1, 4, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 2, LENGTH, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return query, key, value


def dense(query, key, value, mask):
    keys, values = (x.repeat_interleave(2, dim=1) for x in (key, value))
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2)


def test_dense_mask_by_hand():
    # Prompt of 2, completions of 1 and 2 behind it.
    mask = dense_mask([Span(0, 2), Span(2, 1, 0, 2), Span(3, 2, 0, 2)])[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]


def test_plan_and_dense_mask_agree_in_value_and_gradient():
    mine, theirs = states(), states()
    output, _ = packed_attention(Layer(), *mine, None, packing=make_plan(SPANS))
    expected = dense(*theirs, dense_mask(SPANS))
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("window", [1, 3, 6, 40])
def test_a_sliding_window_counts_positions_of_the_sequence(window):
    position = torch.empty(LENGTH, dtype=torch.long)
    for span in SPANS:
        position[span.start : span.start + span.length] = span.prefix_length + torch.arange(span.length)
    mask = dense_mask(SPANS) & (position[None, :] > position[:, None] - window)[None, None]
    assert torch.equal(dense_mask(SPANS, window), mask)
    query, key, value = states()
    output, _ = packed_attention(Layer(), query, key, value, None, packing=make_plan(SPANS), sliding_window=window)
    torch.testing.assert_close(output, dense(query, key, value, mask))


def test_cost_is_that_of_the_spans_not_of_the_row():
    plan = make_plan([Span(i * 8, 8) for i in range(100)])
    pairs = sum(call.query_RQ.shape[0] * call.query_RQ.shape[1] * call.key_RK.shape[1] for call in plan.calls)
    assert pairs == 100 * 64
