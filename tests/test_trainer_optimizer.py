"""Learning rate as a function of the update; AdamW over float32 copies."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from grpo_cli.trainer.optimizer import ReplicatedAdamW, lr_at
from tests import tiny


def rates(*overrides: str, updates: int, total: int | None = 10) -> list[float]:
    trainer = tiny.config("trainer.lr=1.0", *overrides).trainer
    return [lr_at(update, trainer, total) for update in range(updates)]


def test_warm_up_ends_when_its_steps_are_done():
    assert rates("trainer.warmup_steps=2", updates=4) == [0.5, 1.0, 1.0, 1.0]
    # Two steps of two updates in each of two epochs: eight updates.
    slow = rates("trainer.warmup_steps=2", "trainer.updates_per_step=2", "trainer.epochs_per_step=2", updates=9)
    assert slow == [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1.0, 1.0]


def test_linear_decay_starts_after_warm_up():
    found = rates("trainer.warmup_steps=2", "trainer.lr_schedule=linear", updates=12)
    assert found == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0])


def test_cosine_decay_is_half_way_in_the_middle():
    found = rates("trainer.lr_schedule=cosine", updates=10)
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.5)
    assert found[9] == pytest.approx((1 + math.cos(0.9 * math.pi)) / 2)


def test_a_warm_up_as_long_as_the_run_divides_by_nothing():
    assert rates("trainer.warmup_steps=10", "trainer.lr_schedule=linear", updates=11)[9:] == [1.0, 1.0]


def test_constant_needs_no_length():
    assert rates(updates=2, total=None) == [1.0, 1.0]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, passes: int = 1) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        for _ in range(passes):
            inputs = torch.randn(4, 8).to(next(model.parameters()).dtype)
            (model(inputs).float().square().sum() / passes).backward()
        optimizer.step()


def test_float32_is_torchs_adamw():
    adam = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}
    torch.manual_seed(0)
    mine, theirs = nn.Linear(8, 3), nn.Linear(8, 3)
    theirs.load_state_dict(mine.state_dict())
    train(mine, ReplicatedAdamW(mine.parameters(), None, **adam), 3)
    optimizer = torch.optim.AdamW(theirs.parameters(), **adam)
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        theirs(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_keeps_updates_that_its_own_weights_would_lose():
    # A weight of 1 in bfloat16 has neighbours 2^-8 and 2^-7 away: 100 updates of 1e-5 vanish one by one, not together.
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = ReplicatedAdamW([weight], None, lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        weight.sum().backward()
        optimizer.step()
    assert weight.item() == pytest.approx(0.99, abs=4e-3)


def test_bfloat16_gradients_add_up_in_float32():
    # 256 + 1 is 256 in bfloat16.
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = ReplicatedAdamW([weight], None, lr=1.0)
    for gradient in (256.0, 1.0):
        (weight * gradient).sum().backward()
    assert optimizer.param_groups[0]["params"][0].grad.item() == 257.0
    assert weight.grad is None


def test_state_goes_on_bit_for_bit():
    torch.manual_seed(0)
    one = nn.Linear(8, 3).bfloat16()
    optimizer = ReplicatedAdamW(one.parameters(), 1.0, lr=1e-3)
    train(one, optimizer, 2)
    other = nn.Linear(8, 3).bfloat16()
    resumed = ReplicatedAdamW(other.parameters(), 1.0, lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(one, optimizer, 2)
    train(other, resumed, 2)
    for a, b in zip(optimizer.state_dict()["masters"], resumed.state_dict()["masters"], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
