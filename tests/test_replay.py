"""`grpo replay`: the golden cases, what it refuses and where, what it prints."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest

from grpo_cli.advantage import ESTIMATORS
from grpo_cli.cli import main
from grpo_cli.errors import ConfigError
from grpo_cli.replay import replay

CASES = json.loads((Path(__file__).parent / "data" / "golden_cases.json").read_text())
SHARED = Path(__file__).parents[2] / "shared" / "golden" / "cases.json"
TWO_EPOCHS = "trainer.epochs_per_step=2"


def assert_close(got, expected, rtol, atol):
    """Same nesting, and |got - expected| <= atol + rtol |expected| number by number; NaN is never close."""
    if isinstance(expected, list):
        assert isinstance(got, list)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other, rtol, atol)
    else:
        assert abs(got - expected) <= atol + rtol * abs(expected)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_golden(case):
    groups = copy.deepcopy(case["groups"])
    got, expect = replay(case["overrides"], groups), case["expect"]
    assert groups == case["groups"], "the caller's groups are left alone"
    assert [group["dropped"] for group in got["groups"]] == expect["dropped"]
    for name in ("advantages", "token_advantages"):
        if expect.get(name) is not None:
            assert_close([group[name] for group in got["groups"]], expect[name], case["rtol"], case["atol"])
        else:
            assert all(group[name] is None for group in got["groups"])
    if expect.get("advantages") is not None and "advantage=gdpo" not in case["overrides"]:
        for values, wanted in zip([group["advantages"] for group in got["groups"]], expect["advantages"], strict=True):
            assert any(wanted) or not any(values), "zeros are exact"
    assert_close(got["loss"], expect["loss"], case["rtol"], case["atol"])
    assert_close(got["token_grad"], expect["token_grad"], case["rtol"], case["atol"])
    json.dumps(got, allow_nan=False)


@pytest.mark.skipif(not SHARED.exists(), reason="the shared cases are not beside this checkout")
def test_the_copied_cases_are_the_shared_ones():
    assert json.loads(SHARED.read_text()) == CASES


def completion(reward=1.0, length=2, **fields):
    return {
        "text": "x",
        "token_ids": list(range(length)),
        "finish_reason": "stop",
        "rewards": reward if isinstance(reward, dict) else {"exact": reward},
        "reward": None,
        "advantage": None,
        "logprobs": [-1.0] * length,
        "old_logprobs": None,
        "ref_logprobs": None,
        "sampler_logprobs": None,
    } | fields


def group(*completions, group_id="1-0"):
    return {
        "step": 1,
        "group_id": group_id,
        "prompt_id": "row-0",
        "prompt": "?",
        "prompt_token_ids": [1],
        "policy_version": 1,
        "dropped": None,
        "completions": list(completions),
    }


def pair(**fields):
    return group(completion(1.0, **fields), completion(0.0, **fields))


# --- cases of the field ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("filter_", ["none", "zero_std"])
def test_constant_groups_have_no_advantage_and_no_gradient(name, filter_):
    """Case A01."""
    groups = [group(*[completion(2.0)] * 4), group(*[completion(2.0)] * 4, group_id="1-1")]
    got = replay([f"advantage={name}", f"filter={filter_}", "loss.kl_coef=0"], groups)
    rows = [row for one in got["groups"] for row in one["token_advantages"] or [one["advantages"]]]
    numbers = [value for row in rows for value in row]
    assert numbers
    assert not any(numbers)
    assert not any(value for one in got["token_grad"] for row in one for value in row)
    assert got["metrics"]["frac_reward_zero_std"] == 1.0
    assert [one["dropped"] for one in got["groups"]] == [None if filter_ == "none" else "zero_std"] * 2


def test_none_is_unscored_and_not_zero():
    """Case A05."""
    groups = [
        group(*[completion(reward, logprobs=[-1.0, -2.0]) for reward in (None, 1.0, 0.0, 1.0)]),
        group(*[completion(None, logprobs=None)] * 4, group_id="1-1"),
        group(*[completion(reward) for reward in (None, 1.0, None, None)], group_id="1-2"),
    ]
    got = replay([], groups)
    assert got["groups"][0]["advantages"] == pytest.approx([0, 0.57735, -1.15470, 0.57735], abs=1e-4)
    assert [one["dropped"] for one in got["groups"]] == [None, "unscored", "unscored"]
    assert got["token_grad"][0][0] == [0.0, 0.0]
    assert got["token_grad"][1] == [[0.0, 0.0]] * 4
    assert got["metrics"]["groups/unscored_count"] == 2
    assert got["metrics"]["loss/tokens_count"] == 6  # the unscored completion is in no denominator either


def test_a_null_term_is_left_out_of_the_sum():
    groups = [
        group(completion({"a": 1.0, "b": None}), completion({"a": 1.0, "b": 1.0}), completion({"a": None, "b": None}))
    ]
    got = replay(["advantage=dr_grpo", "replay.weights={b: 0.5}"], groups)
    assert got["groups"][0]["advantages"] == [-0.25, 0.25, 0.0]


def test_empty_completions():
    """Case B04."""
    got = replay([], [group(completion(1.0, 0), completion(0.0, 0))])
    assert (got["loss"], got["token_grad"]) == (0.0, [[[], []]])
    got = replay([], [group(completion(1.0, 0), completion(0.0, 1))])
    assert math.isfinite(got["loss"])
    assert got["metrics"]["loss/tokens_count"] == 1


def test_kl_in_the_reward_needs_its_estimator():
    """Case D02 (d): another estimator reads no KL in the reward; `replay` says so and goes on."""
    overrides = ["loss.use_kl_in_reward=true", "loss.kl_coef=0.1", "advantage=grpo"]
    got = replay(overrides, [pair(old_logprobs=[-1.0, -1.0], ref_logprobs=[-1.0, -1.0])])
    assert got["groups"][0]["advantages"] is not None


def test_the_penalty_does_not_decide():
    """Case E04."""
    overlong = "reward.overlong={max_tokens: 6, buffer_tokens: 4, penalty: 1.0}"
    lengths = (1, 2, 6, 4)
    groups = [group(*[completion({"exact": 0.0, "style": float(n == 6)}, n) for n in lengths])]
    same = [group(*[completion({"exact": 0.0, "style": 0.0}, n) for n in lengths])]

    def dropped(groups, metric):
        got = replay([f"filter.metric={metric}", "rollout.max_new_tokens=6", overlong], groups)
        return got["groups"][0]["dropped"]

    assert (dropped(same, "unshaped"), dropped(same, "total")) == ("zero_std", None)
    assert (dropped(groups, "unshaped"), dropped(groups, "exact")) == (None, "zero_std")


def test_what_shapes_the_baseline():
    """Case E11."""
    truncated = group(*[completion(r) for r in (1.0, 0.0, 0.0)], completion(9.0, finish_reason="length"))
    got = replay(["loss.mask_truncated=true"], [truncated])
    assert got["groups"][0]["advantages"] == pytest.approx([-0.3441, -0.5735, -0.5735, 1.4912], abs=1e-4)
    assert got["token_grad"][0][3] == [0.0, 0.0]


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(overrides, groups):
    with pytest.raises(ConfigError) as error:
        replay(overrides, groups)
    return error.value.findings


def without(owner, field):
    return {key: value for key, value in owner.items() if key != field}


GROUP_FIELDS = ["step", "group_id", "prompt_id", "prompt", "prompt_token_ids", "policy_version", "completions"]
COMPLETION_FIELDS = [
    "text",
    "token_ids",
    "finish_reason",
    "rewards",
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "sampler_logprobs",
]


@pytest.mark.parametrize("field", GROUP_FIELDS)
def test_a_missing_field_of_a_group_is_named(field):
    (finding,) = refused([], [pair(), without(pair(), field)])
    assert f"groups[1]: {field} is missing; expected" in finding.message


@pytest.mark.parametrize("field", COMPLETION_FIELDS)
def test_a_missing_field_of_a_completion_is_named(field):
    findings = refused([], [group(completion(), without(completion(), field))])
    assert f"groups[0]: completions[1].{field} is missing; expected" in findings[0].message


@pytest.mark.parametrize("field", ["dropped", "completions.reward", "completions.advantage", "completions.entropies"])
def test_what_is_recomputed_or_optional_may_be_missing(field):
    name = field.rpartition(".")[2]
    one = without(group(*[without(completion(reward), name) for reward in (1.0, 0.0)]), name)
    assert replay([], [one])["groups"][0]["dropped"] is None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"old_logprobs": [-1.0]}, "completions[0].old_logprobs has 1 entries; expected 2"),
        ({"logprobs": [-1.0, math.nan]}, "completions[0].logprobs[1] is NaN; expected a finite number"),
        ({"logprobs": [-1.0, -math.inf]}, "completions[0].logprobs[1] is -Infinity; expected a finite number"),
        ({"logprobs": [-1.0, None]}, "completions[0].logprobs[1] is null; expected a finite number"),
        ({"logprobs": [-1.0, True]}, "completions[0].logprobs[1] is true; expected a finite number"),
        ({"logprobs": "x"}, 'completions[0].logprobs is "x"; expected null or a list of 2 numbers'),
        ({"token_ids": [1, 2.5]}, "completions[0].token_ids is [1, 2.5]; expected a list of token ids"),
        ({"finish_reason": "eos"}, 'completions[0].finish_reason is "eos"; expected stop or length'),
        ({"finish_reason": ["stop"]}, "completions[0].finish_reason is"),
        ({"rewards": {"exact": math.nan}}, 'completions[0].rewards is {"exact": NaN}'),
        ({"rewards": {"exact": "1"}}, 'completions[0].rewards is {"exact": "1"}'),
        ({"rewards": [1.0]}, "completions[0].rewards is [1.0]; expected an object"),
        ({"text": None}, "completions[0].text is null; expected text"),
        ({"entropies": [0.5]}, "completions[0].entropies has 1 entries; expected 2"),
        ({"entropies": [-1e-7, -0.5]}, "completions[0].entropies[1] is -0.5; expected 0 or more"),
        ({"logprobs": [-1.0, -(10**400)]}, "completions[0].logprobs[1] is -1000"),
        ({"logprobs": [-1.0, -1e300]}, "completions[0].logprobs[1] is -1e+300; expected a finite number (up to 1e+60)"),
        ({"rewards": {"exact": 10**400}}, 'completions[0].rewards is {"exact": 1000'),
        ({"rewards": {"exact": 1e308}}, 'completions[0].rewards is {"exact": 1e+308}'),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(fields, told):
    findings = refused([], [group(completion(1.0, **fields), completion(0.0))])
    assert told in findings[0].message


@pytest.mark.parametrize("value", [None, 3, [], "x"])
def test_a_group_must_be_an_object(value):
    assert "where a group was expected" in refused([], [value])[0].message


def test_a_term_that_one_completion_lacks_is_an_error():
    (finding,) = refused([], [group(completion({"a": 1.0, "b": 1.0}), completion({"a": 1.0}))])
    assert "completions[1].rewards.b is missing" in finding.message


def test_a_group_twice_is_an_error():
    (finding,) = refused([], [pair(), {**pair(), "group_id": "1-1"}, pair()])
    assert 'groups[2]: group_id "1-0" stands in groups[0] already' in finding.message


def test_all_mistakes_are_told_at_once():
    findings = refused([], [pair(logprobs=[0.0]), without(pair(), "group_id")])
    assert len(findings) == 3


def test_unknown_terms_are_refused():
    (finding,) = [f for f in refused(["replay.weights={exct: 1.0}"], [pair()]) if f.severity == "error"]
    assert (finding.rule, finding.keys) == ("replay_weights_known", ("replay.weights",))
    assert "exct" in finding.message
    assert "exact" in finding.message
    assert "filter_metric_known" in [f.rule for f in refused(["filter.metric=exct"], [pair()])]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["loss.kl_coef=0.1"], "ref_logprobs"),
        (["loss.correction.mode=truncate", "loss.correction.high=2.0"], "sampler_logprobs"),
        (["loss.seq_logprob_error_threshold=2.0"], "sampler_logprobs"),
        (["loss.entropy_coef=0.1"], "entropies"),
        (["loss.top_entropy_quantile=0.2"], "entropies"),
    ],
)
def test_a_needed_list_that_is_null_is_an_error(overrides, field):
    """Case D07: never a weight of 1 in silence."""
    errors = [f for f in refused(overrides, [pair()]) if f.severity == "error"]
    assert [
        f"groups[0]: completions[{index}].{field} is null, but needed" in error.message
        for index, error in enumerate(errors)
    ] == [True, True]
    lists = {field: [-1.0, -1.0] if field != "entropies" else [0.5, 0.7]}
    assert math.isfinite(replay(overrides, [pair(**lists)])["loss"])


def test_many_mistakes_are_counted():
    errors = refused(["loss.kl_coef=0.1"], [{**pair(), "group_id": f"1-{index}"} for index in range(30)])
    assert len(errors) == 21
    assert "and 40 more" in errors[-1].message


def test_what_truncated_sampling_did_to_the_samplers_logprobs_enters_no_ratio():
    """Case D05: probabilities 0.5, 0.3, 0.2 at top_p=0.8: the engine says 0.625 of the first, the trainer 0.5."""
    lists = {
        "logprobs": [math.log(0.5)] * 2,
        "old_logprobs": [math.log(0.5)] * 2,
        "sampler_logprobs": [math.log(0.625)] * 2,
    }
    plain = {name: values for name, values in lists.items() if name != "sampler_logprobs"}
    got, without = (replay([TWO_EPOCHS, "rollout.top_p=0.8"], [pair(**given)]) for given in (lists, plain))
    assert (got["metrics"]["ratio/min"], got["metrics"]["ratio/max"]) == (1.0, 1.0)
    assert (got["loss"], got["token_grad"]) == (without["loss"], without["token_grad"])


def test_untrained_completions_need_no_lists():
    bare = completion(None, logprobs=None)
    got = replay(["loss.kl_coef=0.1"], [group(bare, *pair(ref_logprobs=[-1.0, -1.0])["completions"])])
    assert got["token_grad"][0][0] == [0.0, 0.0]
    assert math.isfinite(got["loss"])


def test_no_logprobs_at_all_is_an_error():
    findings = refused([], [pair(logprobs=None)])
    assert "completions[0].logprobs is null" in findings[0].message


def test_null_old_logprobs_are_replaced_with_a_warning(capsys):
    got = replay([TWO_EPOCHS], [pair()])
    assert got["metrics"]["ratio/max"] == 1.0
    assert "old_logprobs of 2 trained completions are null" in capsys.readouterr().err
    replay([], [pair()])
    assert "old_logprobs" not in capsys.readouterr().err


def test_the_rest_of_the_rules_only_warns(capsys):
    got = replay(["loss=gspo", "loss.ratio_level=token"], [pair()])
    assert got["groups"][0]["dropped"] is None
    assert "warning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["loss.clip_high=null"], "clip_range_needs_both_bounds"),
        (["loss=cispo", "loss.clip_high=null"], "cispo_needs_clip_high"),
        (["loss.aggregation=constant"], "constant_aggregation_needs_length"),
        (["loss.correction.mode=truncate"], "truncate_needs_high"),
        (["loss.kl_coeff=0.1"], "key_known"),
        (["loss=pppo"], "option_known"),
        (["trainer.lr=abc"], "value_type"),
    ],
)
def test_rules_that_replay_refuses(overrides, rule):
    groups = [pair(sampler_logprobs=[-1.0, -1.0])]
    assert rule in [finding.rule for finding in refused(overrides, groups) if finding.severity == "error"]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def dump(tmp_path):
    def write(*lines):
        path = tmp_path / "step_000001.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


def test_json_output_is_the_functions(dump, capsys):
    case = next(case for case in CASES if case["id"] == "loss-ppo_clip")
    path = dump(*case["groups"], "")
    assert main(["replay", str(path), "--json", *case["overrides"]]) == 0
    assert json.loads(capsys.readouterr().out) == replay(case["overrides"], case["groups"])


def test_the_table_tells_what_happened(dump, capsys):
    case = next(case for case in CASES if case["id"] == "loss-ppo_clip")
    same = group(*[completion(0.5, old_logprobs=[-1.0, -1.0])] * 4, group_id="9-9")
    assert main(["replay", str(dump(*case["groups"], same)), *case["overrides"]]) == 0
    out = capsys.readouterr().out
    for part in ("group", "dropped", "advantages", "clipped", "zero_std", "9-9", "gradient", "high"):
        assert part in out
    for one in case["groups"]:
        assert one["group_id"] in out
    assert f"loss     {case['expect']['loss']:.6g}" in out


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([group(*[completion(1.0)] * 2)], "Every group was dropped"),
        ([pair()], "advantages cancel at ratio 1"),
        ([group(completion(1.0, 0), completion(0.0, 0))], "No token is trained"),
    ],
)
def test_a_loss_of_zero_is_explained(groups, told, dump, capsys):
    assert main(["replay", str(dump(*groups))]) == 0
    assert told in capsys.readouterr().out


def test_bad_files_are_exit_2_with_file_and_line(dump, tmp_path, capsys):
    path = dump(pair(), '{"step": 1', "", "[1]", json.dumps(pair()).replace("-1.0", "NaN", 1))
    assert main(["replay", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}:2: " in err
    assert f"{path}:5: NaN is not a finite number" in err
    assert main(["replay", str(dump(pair(), [1], without(pair(), "step")))]) == 2
    err = capsys.readouterr().err
    assert f"{path}:2: [1] where a group was expected" in err
    assert f"{path}:3: step is missing; expected an integer" in err
    assert main(["replay", str(dump(""))]) == 2
    assert "holds no group" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nothing.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    path.write_bytes(b'\xff{"step": 1}\n')
    assert main(["replay", str(path)]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_a_byte_order_mark_and_crlf_are_fine(tmp_path):
    path = tmp_path / "dump.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(pair()).encode() + b"\r\n\r\n")
    assert main(["replay", str(path), "--json"]) == 0


def test_numbers_too_large_for_a_float_are_refused(dump, capsys):
    assert main(["replay", str(dump(json.dumps(pair()).replace("-1.0", "-1e999", 1)))]) == 2
    assert "expected a finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"step": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"step": 1, "rewards": {"a": 1, "a": 0}}', "the key 'a' stands twice in one object"),
    ],
)
def test_what_json_itself_lets_through_is_refused_by_line(line, told, dump, capsys):
    path = dump(pair(), line)
    assert main(["replay", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}:2: {told}" in err
    assert err.count("error: ") == 1


def test_a_name_is_shown_as_it_is_and_commands_nothing(dump, capsys):
    names = ["[/foo]", "[red]x", ":smile:", "a\nb\x1b[2J", "\ud800"]
    assert main(["replay", str(dump(*[{**pair(), "group_id": name} for name in names]))]) == 0
    out = capsys.readouterr().out
    for shown in ("[/foo]", "[red]x", ":smile:", "a b\\x1b[2J", "\\ud800"):
        assert shown in out


def test_a_loss_that_is_no_number_is_shown_as_such(dump, capsys):
    """exp(1000) overflows: +inf in one group and -inf in the other."""
    far = [pair(logprobs=[999.0, 999.0], old_logprobs=[-1.0, -1.0])["completions"][1]] * 2
    groups = [group({**far[0], "rewards": {"exact": reward}}, far[1], group_id=str(reward)) for reward in (1.0, -1.0)]
    overrides = [TWO_EPOCHS, "loss=reinforce", "loss.correction.mode=mask", "loss.correction.low=0.5"]
    for one in groups:
        for each in one["completions"]:
            each["sampler_logprobs"] = [-999.0, -999.0]
    assert main(["replay", str(dump(*groups)), *overrides]) == 0
    assert "loss     nan" in capsys.readouterr().out
    assert main(["replay", str(dump(*groups)), "--json", *overrides]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] is None
