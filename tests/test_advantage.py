"""Every estimator against numbers worked out by hand, and what all of them share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from configs import make_config, make_group

from grpo_cli.advantage import ESTIMATORS, assign
from grpo_cli.masks import trained
from grpo_cli.schema import Overlong

GROUP_RELATIVE = [name for name in ESTIMATORS if name != "reinforce_pp"]


def advantages(groups, *overrides, weights=None):
    assign(groups, make_config(*overrides), weights)
    return [[completion.advantage for completion in group.completions] for group in groups]


def of_group(rewards, *overrides, lengths=None):
    return advantages([make_group(*rewards, lengths=lengths)], *overrides)[0]


def test_grpo_divides_by_the_deviation_of_the_group():
    # mean 1/4, deviations 3/4, -1/4 x 3: std (ddof 1) = sqrt((9/16 + 3/16) / 3) = 1/2
    assert of_group([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_grpo_with_batch_deviation():
    # rewards 1,0 | 2,0: mean 3/4, squares 1/16 + 9/16 + 25/16 + 9/16 = 44/16, std = sqrt(44/48) = 0.9574271
    groups = [make_group(1.0, 0.0), make_group(2.0, 0.0, group_id="1-1")]
    first, second = advantages(groups, "advantage.normalize=batch")
    assert first == pytest.approx([0.5 / 0.9574271, -0.5 / 0.9574271], abs=1e-5)
    assert second == pytest.approx([1 / 0.9574271, -1 / 0.9574271], abs=1e-5)


def test_grpo_leave_one_out_keeps_the_deviation_of_the_whole_group():
    # others of 1: mean 0; others of a 0: mean 1/3; std 1/2
    got = of_group([1.0, 0.0, 0.0, 0.0], "advantage.leave_one_out=true")
    assert got == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3], abs=1e-5)


def test_dr_grpo_and_rloo_only_subtract():
    assert of_group([1.0, 0.0, 0.0, 0.0], "advantage=dr_grpo") == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert of_group([1.0, 0.0, 0.0, 0.0], "advantage=rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_reinforce_pp_leaves_the_reward_to_the_whitening():
    assert of_group([1.0, 0.25], "advantage=reinforce_pp", "advantage.clip=0.5") == [1.0, 0.25]
    assert of_group([1.0, 0.25], "advantage=reinforce_pp_baseline") == [0.375, -0.375]


def test_opo_weighs_the_baseline_by_length():
    # (1 x 1 + 0 x 3) / 4 = 1/4
    assert of_group([1.0, 0.0], "advantage=opo", lengths=[1, 3]) == [0.75, -0.25]
    assert of_group([1.0, 0.0], "advantage=opo", lengths=[0, 0]) == [0.5, -0.5]


def test_passk_rewards_the_single_best():
    # std of 3, 1, 2 is 1
    assert of_group([3.0, 1.0, 2.0], "advantage=passk") == pytest.approx([1.0, 0.0, 0.0], abs=1e-5)
    assert of_group([3.0, 3.0, 2.0], "advantage=passk") == [0.0, 0.0, 0.0]


def test_maxrl_divides_by_a_positive_mean():
    assert of_group([1.0, 0.0, 0.0, 0.0], "advantage=maxrl") == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert of_group([1.0, -1.0], "advantage=maxrl") == [0.0, 0.0]
    assert of_group([-1.0, -2.0], "advantage=maxrl") == [0.0, 0.0]


def test_gdpo_scores_each_term_before_they_are_summed():
    # a: z = +-0.7071068; b (weight 2) is the other way round: sums -+0.7071068 in group 1, +-0.7071068 in group 2
    groups = [
        make_group({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 5.0}),
        make_group({"a": 1.0, "b": 3.0}, {"a": 0.0, "b": 3.0}, group_id="1-1"),
    ]
    first, second = advantages(groups, "advantage=gdpo", weights={"a": 1.0, "b": 2.0})
    # step: +-0.7071068 twice, mean 0, std (ddof 1) = sqrt(4 x 0.5 / 3) = 0.8164966; 0.7071068 / 0.8164966 = 0.8660254
    assert first == pytest.approx([-0.8660254, 0.8660254], abs=1e-5)
    assert second == pytest.approx([0.8660254, -0.8660254], abs=1e-5)


def test_gdpo_counts_the_overlong_penalty_as_a_term():
    cfg = make_config("advantage=gdpo")
    reward = cfg.reward.model_copy(update={"overlong": Overlong(max_tokens=4, buffer_tokens=2, penalty=0.1)})
    group = make_group(1.0, 1.0, lengths=[1, 4])
    assign([group], cfg.model_copy(update={"reward": reward}))
    # the term is constant; the penalties 0 and -0.1 have z = +-0.7071, which the step's z-score leaves as they are
    assert [c.advantage for c in group.completions] == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_clip_comes_last():
    assert of_group([1.0, 0.0, 0.0, 0.0], "advantage.clip=0.8") == pytest.approx([0.8, -0.5, -0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize("eps", ["1e-6", "1e-12"])
def test_constant_groups_have_exactly_no_advantage(name, eps):
    """Case A03: the deviation of equal floats is rounding dust, and dust over eps is an advantage of thousands."""
    for value in (0.1, 0.3, 0.7, 0.95, 1.1, 2.3, -0.7):
        for size in (*range(3, 17), 64):
            assert of_group([value] * size, f"advantage={name}", f"advantage.eps={eps}") == [0.0] * size


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_constant_group_stays_zero_beside_one_with_signal(name):
    groups = [make_group(*[0.1] * 6), make_group(1.0, 0.0, 0.3, 0.0, 0.7, 0.1, group_id="1-1")]
    for overrides in ([], ["advantage.normalize=batch"] if name == "grpo" else []):
        constant, varied = advantages(groups, f"advantage={name}", *overrides)
        assert constant == [0.0] * 6
        assert any(varied)


def test_unscored_completions_stay_out_of_every_statistic():
    # case A05: rewards 1, 0, 1: mean 2/3, std 0.57735
    assert of_group([None, 1.0, 0.0, 1.0]) == pytest.approx([0.0, 0.57735, -1.15470, 0.57735], abs=1e-4)
    # case E11
    assert of_group([1.0, 0.0, 0.0, None]) == pytest.approx([1.1547, -0.5773, -0.5773, 0.0], abs=1e-4)


def test_truncated_completions_stay_in_the_statistics_and_out_of_the_loss():
    cfg = make_config("loss.mask_truncated=true")
    group = make_group(1.0, 0.0, 0.0, 9.0)
    group.completions[3].finish_reason = "length"
    assign([group], cfg)
    assert [c.advantage for c in group.completions] == pytest.approx([-0.3441, -0.5735, -0.5735, 1.4912], abs=1e-4)
    assert trained(group, cfg) == [True, True, True, False]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_of_one_scored_completion_is_not_trained(name):
    cfg = make_config(f"advantage={name}", "filter=none")
    groups = [make_group(None, 1.0, None, None), make_group(*[None] * 4), make_group(1.0, 0.0, 0.0, 1.0)]
    assign(groups, cfg)
    assert [c.advantage for group in groups[:2] for c in group.completions] == [0.0] * 8
    assert [trained(group, cfg) for group in groups] == [[False] * 4, [False] * 4, [True] * 4]


def test_reinforce_pp_trains_on_one_completion_a_prompt():
    # case A09: nothing in reinforce_pp compares inside a group
    group = make_group(1.0)
    assert trained(group, make_config("advantage=reinforce_pp", "filter=none"))
    assert of_group([1.0], "advantage=reinforce_pp") == [1.0]
    assert trained(group, make_config("advantage=grpo", "filter=none")) == [False]


def test_dropped_and_unscored_are_never_trained():
    cfg = make_config()
    group = make_group(1.0, None, 0.0)
    assert trained(group, cfg) == [True, False, True]
    assert trained(replace(group, dropped="zero_std"), cfg) == [False] * 3


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_finite_on_wild_rewards(name):
    groups = [make_group(1e9, -1e9, 1e-9, 0.0), make_group(None, 5.0, 5.0 + 1e-15, 5.0, group_id="1-1")]
    for values in advantages(groups, f"advantage={name}"):
        assert all(map(math.isfinite, values))
