"""Drawing tokens: probabilities that are known in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_cli.rollout.draw import draw, truncate
from grpo_cli.rollout.sampling import Sampling

PROBS = [0.5, 0.3, 0.2]
GRID = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000  # every thousandth once: frequencies come out exactly


def sampling(**changed) -> Sampling:
    return Sampling(**{"n": 1, "max_new_tokens": 1, "temperature": 1.0, **changed})


def logits(rows: int = len(GRID)) -> torch.Tensor:
    return torch.tensor(PROBS).log().expand(rows, -1)


def test_frequencies_are_the_probabilities():
    tokens, logprobs = draw(logits(), GRID, sampling())
    assert tokens.bincount().tolist() == [500, 300, 200]
    assert logprobs.tolist() == pytest.approx([math.log(PROBS[token]) for token in tokens.tolist()], abs=1e-6)


def test_temperature_is_in_the_logprob():
    # softmax([2, 0] / 0.5)[0] = 1 / (1 + e^-4)
    tokens, logprobs = draw(torch.tensor([[2.0, 0.0]]), torch.zeros(1, dtype=torch.float64), sampling(temperature=0.5))
    assert tokens.tolist() == [0]
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-4)), abs=1e-6)
    assert logprobs.item() == pytest.approx(-0.01815, abs=1e-5)


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"top_p": 0.8}, [0.625, 0.375]),  # 0.5 + 0.3 reaches 0.8 exactly: the third is outside
        ({"top_p": 0.81}, PROBS),
        ({"top_p": 1e-9}, [1.0]),
        ({"top_k": 2}, [0.625, 0.375]),
        ({"top_k": 1}, [1.0]),
        ({"top_k": -1}, PROBS),
        ({"top_k": 0}, PROBS),
        ({"top_k": 99}, PROBS),
        ({"min_p": 0.5}, [0.625, 0.375]),  # 0.3 >= 0.5 * 0.5, 0.2 is not
        ({"min_p": 0.0}, PROBS),
        ({"top_k": 2, "top_p": 0.6}, [1.0]),  # top_p sees 0.625 after top_k, not 0.5
    ],
)
def test_truncated_probabilities_are_renormalised(changed, kept):
    kept_logits = truncate(logits(1), sampling(**changed))
    assert kept_logits.softmax(-1)[0, : len(kept)].tolist() == pytest.approx(kept, abs=1e-6)
    tokens, logprobs = draw(logits(), GRID, sampling(**changed))
    assert tokens.max() == len(kept) - 1
    assert logprobs.exp().tolist() == pytest.approx([kept[token] for token in tokens.tolist()], abs=1e-6)


def test_order_of_the_vocabulary_does_not_matter_to_top_p():
    shuffled = torch.tensor([0.2, 0.5, 0.3]).log()[None]
    assert truncate(shuffled, sampling(top_p=0.8)).softmax(-1)[0].tolist() == pytest.approx([0, 0.625, 0.375], abs=1e-6)


def test_greedy_takes_the_first_maximum_and_the_untempered_logprob():
    tokens, logprobs = draw(logits(2), None, sampling(temperature=0.0))
    assert tokens.tolist() == [0, 0]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 2, abs=1e-6)


def test_impossible_tokens_are_never_drawn():
    impossible = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for uniform in (0.0, 0.5, 1.0 - 2**-53):
        tokens, logprobs = draw(impossible, torch.tensor([uniform], dtype=torch.float64), sampling())
        assert tokens.tolist() == [1]
        assert logprobs.tolist() == [0.0]


def test_bfloat16_logits_are_computed_in_float32():
    rows = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs = draw(rows, torch.full((4,), 0.5, dtype=torch.float64), sampling())
    exact = rows.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), exact, atol=1e-5)
