"""Fingerprints of weights, without an engine."""

from __future__ import annotations

import pytest
import torch

from grpo_cli.rollout import fingerprint


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(96, 64), (64,)])
def test_equal_weights_have_no_gap_and_different_ones_about_their_difference(shape):
    original = weight(*shape)
    shown = fingerprint.of_weight(original)
    assert fingerprint.gap(original, shown) == 0.0
    moved = original * (1 + 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    # A relative difference of 0.1, seen through four random directions: about 0.1, give or take a factor of a few.
    assert 0.03 < fingerprint.gap(moved, shown) < 0.4


def test_a_layers_own_product_is_the_same_fingerprint():
    original = weight(96, 64)
    output = fingerprint.signs("right", 64) @ original.T
    assert fingerprint.of_output(output) == pytest.approx(fingerprint.of_weight(original), rel=1e-4)


def test_bfloat16_rounding_is_no_gap():
    original = weight(96, 64).bfloat16()
    output = fingerprint.signs("right", 64).bfloat16() @ original.T
    assert fingerprint.gap(original, fingerprint.of_output(output)) == 0.0


def test_nan_is_a_gap_and_other_shapes_are_left_out():
    broken = fingerprint.of_weight(weight(8, 8) * float("nan"))
    assert fingerprint.gap(weight(8, 8), broken) == float("inf")
    assert fingerprint.of_weight(weight(2, 3, 4)) is None
