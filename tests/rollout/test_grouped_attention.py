"""Grouped decoding attention equals transformers' own, and is switched off again."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_cli.rollout.attention import attend, grouped_decoding


class Layer(torch.nn.Module):
    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


def tensors(heads: int, kv_heads: int, positions: int):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, heads, positions, 8), (3, kv_heads, 5, 8), (3, kv_heads, 5, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_transformers(heads, kv_heads, positions, masked):
    mask = None
    if masked:
        mask = torch.ones(3, 1, positions, 5, dtype=torch.bool).tril(5 - positions)
        mask[1, :, :, 0] = False
        mask[:, :, 0, 1] = True  # no row without a key
        mask[:, :, 0, 0] = mask[:, :, 0, 0] | (positions > 1)
    arguments = (Layer(heads // kv_heads), *tensors(heads, kv_heads, positions), mask)
    ours, _ = attend(*arguments, scaling=0.3)
    theirs, _ = sdpa_attention_forward(*arguments, scaling=0.3)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_models_own_attention_comes_back(implementation):
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    layer = model.model.layers[0].self_attn.config
    inside: list[str] = []

    def fail():
        with grouped_decoding(model):
            inside.append(layer._attn_implementation)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == ["grpo_decode" if implementation == "sdpa" else "eager"]
    assert layer._attn_implementation == implementation
