"""Drops with their reasons, refilling, surplus, empty steps, and a state that survives a restart."""

from __future__ import annotations

import json

import pytest
from configs import make_config, make_group

from grpo_cli.errors import GuardStop
from grpo_cli.filter import FILTERS, make_filter


def reasons(groups, *overrides):
    make_filter(make_config(*overrides)).split(groups)
    return [group.dropped for group in groups]


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.95, 1.1, 2.3])
@pytest.mark.parametrize("name", ["zero_std", "dynamic_sampling", "reward_range"])
def test_constant_groups_are_dropped_exactly(value, name):
    """Case A03: the deviation of [0.3] * 6 is 3e-8 in float32; max == min is what decides."""
    groups = [make_group(*[value] * size) for size in (*range(3, 17), 64)]
    assert set(reasons(groups, f"filter={name}")) == {"zero_std"}


def test_the_smallest_difference_is_kept():
    assert reasons([make_group(0.1, 0.1, 0.1 + 1e-17, 0.10000000000000002)]) == [None]


def test_fewer_than_two_scored_is_unscored():
    groups = [make_group(None, None), make_group(None, 1.0), make_group(None, 1.0, 0.0), make_group(1.0)]
    assert reasons(groups) == ["unscored", "unscored", None, "unscored"]


def test_none_drops_nothing():
    groups = [make_group(None, None), make_group(1.0, 1.0), make_group(1.0)]
    assert reasons(groups, "filter=none") == [None, None, None]


def test_reward_range_keeps_its_bounds_and_gives_the_first_reason():
    groups = [make_group(*rewards) for rewards in ([0.5, 0.0], [1.0, 0.5], [0.5, 0.25], [1.0, 1.0], [1.0, 0.9])]
    bounds = ["filter=reward_range", "filter.low=0.25", "filter.high=0.75"]
    assert reasons(groups, *bounds) == [None, None, None, "zero_std", "reward_range"]
    assert reasons(groups, "filter=reward_range", "filter.low=null", "filter.high=0.3")[0] is None
    assert reasons(groups, "filter=reward_range", "filter.low=0.3", "filter.high=null")[0] == "reward_range"


def test_the_metric_decides():
    """Case E04: an all-wrong group whose lengths differ must not survive through the penalty."""
    group = make_group(*[{"exact": 0.0, "style": style} for style in (0.0, 0.0, 1.0, 0.0)])
    for completion, penalty in zip(group.completions, (0.0, 0.0, -1.0, -0.5), strict=True):
        completion.reward += penalty
    assert reasons([group], "filter.metric=unshaped") == [None]
    assert reasons([group], "filter.metric=exact") == ["zero_std"]
    for completion in group.completions:
        completion.unshaped -= completion.rewards["style"]
    assert reasons([group], "filter.metric=unshaped") == ["zero_std"]
    assert reasons([group], "filter.metric=total") == [None]


def test_a_null_metric_takes_no_part():
    group = make_group({"a": None, "b": 0.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0})
    assert reasons([group], "filter.metric=a") == ["zero_std"]
    assert reasons([group], "filter.metric=b") == [None]


def play(filter_, rounds, needed=2, version=1):
    """One step whose rounds come from a script; returns kept ids, drops, metrics and the prompts asked for."""
    refill, asked = filter_.refill(needed, version), []
    while wanted := refill.wanted():
        asked.append(wanted)
        if not rounds:
            break
        refill.add(rounds.pop(0))
    kept, dropped, metrics = refill.result()
    return [group.group_id for group in kept], [(g.group_id, g.dropped) for g in dropped], metrics, asked


def good(group_id, version=1):
    return make_group(1.0, 0.0, group_id=group_id, version=version)


def bad(group_id, version=1):
    return make_group(1.0, 1.0, group_id=group_id, version=version)


@pytest.mark.parametrize("name", ["none", "zero_std", "reward_range"])
def test_other_filters_ask_for_one_round(name):
    kept, _, metrics, asked = play(make_filter(make_config(f"filter={name}")), [[good("1-0"), bad("1-1")]])
    assert asked == [2]
    assert kept == (["1-0", "1-1"] if name == "none" else ["1-0"])
    assert "groups/rounds_count" not in metrics
    assert metrics["frac_reward_zero_std"] == 0.5


def test_dynamic_sampling_refills_and_discards_the_surplus():
    filter_ = make_filter(make_config("filter=dynamic_sampling", "filter.max_rounds=5"))
    rounds = [[bad("1-0"), good("1-1")], [good("1-2"), good("1-3")]]
    kept, dropped, metrics, asked = play(filter_, rounds)
    assert (kept, asked) == (["1-1", "1-2"], [2, 2])
    assert dropped == [("1-0", "zero_std"), ("1-3", "surplus")]
    assert metrics["groups/rounds_count"] == 2
    assert metrics["groups/discarded_count"] == 1
    assert metrics["groups/carried_count"] == 0
    assert metrics["groups/dropped_count"] == 1
    assert metrics["groups/trained_count"] == 2


def test_dynamic_sampling_stops_after_its_rounds():
    """Case E01: exactly max_rounds rounds, then a step with what there is."""
    filter_ = make_filter(make_config("filter=dynamic_sampling", "filter.max_rounds=3"))
    kept, _, metrics, asked = play(filter_, [[bad("1-0"), bad("1-1")] for _ in range(9)])
    assert (kept, asked) == ([], [2, 2, 2])
    assert metrics["groups/rounds_count"] == 3
    assert metrics["groups/trained_count"] == 0
    assert "reward_kept" not in metrics


def test_carried_groups_are_used_first_and_at_most_one_version_old():
    filter_ = make_filter(make_config("filter=dynamic_sampling", "filter.surplus=carry"))
    fresh = [good(f"1-{index}", version=1) for index in range(6)]
    kept, dropped, metrics, _ = play(filter_, [fresh], version=1)
    assert (kept, dropped, metrics["groups/carried_count"]) == (["1-0", "1-1"], [], 4)

    kept, dropped, metrics, asked = play(filter_, [], version=2)
    assert (kept, dropped, asked) == (["1-2", "1-3"], [], [])
    assert metrics["groups/rounds_count"] == 0

    kept, dropped, metrics, asked = play(filter_, [[good("3-0", version=3), good("3-1", version=3)]], version=3)
    assert (kept, asked) == (["3-0", "3-1"], [2])
    assert dropped == [("1-4", "stale"), ("1-5", "stale")]
    assert metrics["groups/stale_count"] == 2
    assert metrics["groups/dropped_count"] == 0


def test_a_carried_group_counts_where_it_was_generated():
    filter_ = make_filter(make_config("filter=dynamic_sampling", "filter.surplus=carry"))
    _, _, metrics, _ = play(filter_, [[good("1-0"), make_group(3.0, 1.0, group_id="1-1")]], needed=1)
    assert (metrics["reward"], metrics["reward_kept"]) == (1.25, 0.5)
    _, _, metrics, _ = play(filter_, [], needed=1)
    assert "reward" not in metrics
    assert metrics["reward_kept"] == 2.0


def test_state_survives_a_restart_through_json():
    cfg = make_config("filter=dynamic_sampling", "filter.surplus=carry", "filter.max_empty_steps=2")
    filter_ = make_filter(cfg)
    play(filter_, [[good("1-0"), good("1-1"), good("1-2")]])
    filter_.end_step([], [], trained=False)
    resumed = make_filter(cfg)
    resumed.load_state(json.loads(json.dumps(filter_.state())))
    assert resumed.state() == filter_.state()
    assert play(resumed, [[good("2-0")]], version=2)[0] == ["1-2", "2-0"]
    with pytest.raises(GuardStop):
        resumed.end_step([], [], trained=False)


def test_the_kth_empty_step_in_a_row_ends_the_run():
    filter_ = make_filter(make_config("filter=dynamic_sampling", "filter.max_rounds=3", "filter.max_empty_steps=2"))
    for trained in (False, True, False):
        filter_.end_step([], [], trained)
    play(filter_, [[bad("1-0"), bad("1-1")] for _ in range(3)])
    _, dropped = filter_.split([bad(f"1-{index}") for index in range(6)])
    with pytest.raises(GuardStop) as stop:
        filter_.end_step([], dropped, trained=False)
    for part in ("2 steps in a row", "0 of 8 needed groups", "3 rounds", "6 zero_std", "rollout.temperature"):
        assert part in str(stop.value)


def test_masked_tokens_are_told_apart_from_dropped_groups():
    filter_ = make_filter(make_config("filter.max_empty_steps=1"))
    with pytest.raises(GuardStop, match="mask_truncated"):
        filter_.end_step([good("1-0")], [], trained=False)


def test_null_never_ends_the_run():
    filter_ = make_filter(make_config("filter.max_empty_steps=null"))
    for _ in range(100):
        filter_.end_step([], [], trained=False)


def test_split_forgets_an_older_reason():
    group = good("1-0")
    group.dropped = "stale"
    assert make_filter(make_config()).split([group]) == ([group], [])


def test_every_filter_is_built():
    for name in FILTERS:
        assert make_filter(make_config(f"filter={name}")).split([]) == ([], [])
