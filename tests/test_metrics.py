"""Group metrics against numbers worked out by hand, and no key without a measurement."""

from __future__ import annotations

import math

import pytest
from configs import make_config, make_group

from grpo_cli.filter import make_filter
from grpo_cli.metrics import group_metrics


def measure(groups, *overrides):
    cfg = make_config(*overrides)
    return group_metrics(groups, *make_filter(cfg).split(groups), cfg)


def test_a_scripted_step_equals_hand_computed_numbers():
    groups = [
        make_group(1.0, 0.0, 0.0, 1.0, lengths=[1, 2, 3, 4], group_id="1-0"),
        make_group(1.0, 1.0, 1.0, 1.0, lengths=[5, 5, 5, 5], group_id="1-1"),
        make_group(0.0, None, None, None, lengths=[0, 1, 1, 1], group_id="1-2"),
    ]
    groups[0].completions[2].finish_reason = "length"
    got = measure(groups)
    # scored: 1 0 0 1 | 1 1 1 1 | 0: mean 6/9; squares 6 x 1/9 + 3 x 4/9 = 2, std = sqrt(2 / 8)
    assert got["reward"] == pytest.approx(6 / 9)
    assert got["reward_std"] == pytest.approx(0.5)
    # groups with two scored: std of 1 0 0 1 is sqrt(1/3), of 1 1 1 1 is 0
    assert got["reward_std_within_group"] == pytest.approx(math.sqrt(1 / 3) / 2)
    assert got["reward_kept"] == 0.5
    assert got["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert got["groups/dropped_count"] == 2
    assert got["groups/dropped_reward_mean"] == pytest.approx(4 / 5)
    assert got["groups/unscored_count"] == 1
    assert got["groups/trained_count"] == 1
    assert got["groups/stale_count"] == 0
    assert got["completions/unscored_count"] == 3
    assert got["completions/length_mean"] == pytest.approx(33 / 12)
    assert got["completions/length_max"] == 5
    assert got["completions/truncated_frac"] == pytest.approx(1 / 12)
    assert got["rewards/number/mean"] == pytest.approx(6 / 9)
    assert got["rewards/number/std"] == pytest.approx(0.5)


@pytest.mark.parametrize("size", [3, 6, 7, 12, 64])
@pytest.mark.parametrize("name", ["none", "zero_std"])
def test_constant_rewards_have_no_signal_under_any_filter(size, name):
    got = measure([make_group(*[0.1] * size)], f"filter={name}")
    assert got["frac_reward_zero_std"] == 1.0
    assert got["reward_std"] == 0.0
    assert got["reward"] == pytest.approx(0.1)


def test_a_kept_group_without_a_trained_token_is_not_trained_on():
    """One of each: trained; a single scored completion; cut throughout, which loss.mask_truncated leaves out."""
    groups = [make_group(1.0, 0.0), make_group(0.25, None), make_group(0.5, 0.75)]
    for completion in groups[2].completions:
        completion.finish_reason = "length"
    got = measure(groups, "filter=none", "loss.mask_truncated=true")
    assert got["groups/trained_count"] == 1
    assert got["reward_kept"] == 0.5
    assert measure(groups, "filter=none")["groups/trained_count"] == 2


def test_terms_are_measured_where_they_scored():
    got = measure([make_group({"a": 1.0, "b": None}, {"a": 0.0, "b": 4.0}, {"a": None, "b": None})])
    assert (got["rewards/a/mean"], got["rewards/b/mean"]) == (0.5, 4.0)
    assert got["rewards/a/std"] == pytest.approx(math.sqrt(0.5))
    assert "rewards/b/std" not in got


def test_a_quantity_that_was_not_measured_has_no_key():
    got = group_metrics([], [], [], make_config())
    assert set(got.values()) == {0.0}
    assert all(key.endswith("_count") for key in got)
    unscored = measure([make_group(None, None)])
    assert not {"reward", "reward_std", "reward_kept", "groups/dropped_reward_mean"} & set(unscored)
