"""Term `python`: the signature read from the text, what it may return, and what a failure means."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards import asked, python_term, scoring, values

from grpo_cli.errors import ConfigError, RunError
from grpo_cli.reward.python import ContractError, checked, read_signature


def test_a_signature_is_read_without_running_the_file(tmp_path):
    path = tmp_path / "r.py"
    path.write_text(
        f"open({str(tmp_path / 'sentinel')!r}, 'w')\n"
        "def f(prompts, completions, *args, answer=None, level, **kwargs): ...\n"
        "def g(a, /, b=1): ...\n"
        "def h(completions, *rest): ...\n"
    )
    signature = read_signature(str(path), "f")
    assert signature.required == ("prompts", "completions", "level")
    assert signature.optional == ("answer",)
    assert signature.takes_any
    assert signature.positional_only == ()
    assert read_signature(str(path), "g").positional_only == ("a",)
    assert read_signature(str(path), "h").positional_only == ("*rest",)
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def g(): ...\ndef h(): ...", "defines no function f; it defines: g, h"),
        ("f = len", "it defines: none"),
        ("def f(:", "is not Python"),
        ("async def f(completions): ...", "is async"),
        ("\x00", "is not Python"),
    ],
)
def test_files_without_the_function(tmp_path, source, reason):
    term = python_term(tmp_path, source)
    with pytest.raises(ValueError, match=reason):
        read_signature(term["path"], "f")
    with pytest.raises(ConfigError, match=r"python_reward_callable.*path, function"), scoring(term):
        pass


@pytest.mark.parametrize(
    ("signature", "seen"),
    [
        ("(completions)", ["completions"]),
        ("(completions, **kw)", ["answer", "completion_ids", "completions", "level", "prompts"]),
        ("(prompts, completions, answer)", ["answer", "completions", "prompts"]),
        ("(completion_ids)", ["completion_ids"]),
        ("(level, answer=3, unknown=4)", ["answer", "level"]),
        ("()", []),
    ],
)
def test_a14_arguments_come_by_name_and_only_those_taken(tmp_path, signature, seen):
    """The names that the function got, and the values of one, as a number that the test can read."""
    source = f"""
def f{signature}:
    got = {{**locals(), **locals().get("kw", {{}})}}
    got = {{name: value for name, value in got.items() if name not in ("kw", "unknown", "prompt")}}
    assert sorted(got) == {seen}, sorted(got)
    expected = dict(prompts=["What?"] * 2, completions=["a", "b"], answer=["5"] * 2, level=[3] * 2,
                    completion_ids=[[1, 2, 3]] * 2)
    assert all(expected[name] == value for name, value in got.items()), got
    return [1, 2]
"""
    with scoring(python_term(tmp_path, source)) as scorer:
        assert values(scorer, [asked("5", "a", "b", level=3)], "f") == [[1.0, 2.0]]


def test_a_column_that_a_row_lacks_is_none(tmp_path):
    source = "def f(completions, level): return [0.0 if value is None else value for value in level]"
    with scoring(python_term(tmp_path, source)) as scorer:
        groups = [asked("5", "a", level=2), asked("5", "a", index=1)]
        assert values(scorer, groups, "f") == [[2.0], [0.0]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0]", "returned 1 rewards for 8 completions"),
        ("[]", "returned 0 rewards for 8 completions"),
        ("[1.0] * 7", "returned 7 rewards for 8 completions"),
        ("[1.0] * 9", "returned 9 rewards for 8 completions"),
        ("1.0", "returned a float, not a list"),
        ("None", "returned a NoneType, not a list"),
        ("(1.0 for _ in range(8))", "returned a generator, not a list"),
        ("__import__('numpy').ones((8, 1))", "returned a ndarray of 2 dimensions, not a list"),
        ("[1.0] * 7 + ['1']", "returned a str as reward 7, not a number"),
        ("[[1.0]] * 8", "returned a list as reward 0, not a number"),
        ("{i: 1.0 for i in range(8)}", "returned a dict, not a list"),
        ("'11111111'", "returned a str, not a list"),
    ],
)
@pytest.mark.parametrize("on_error", ["abort", "unscored"])
def test_a07_a_broken_contract_ends_the_run_whatever_on_error_says(tmp_path, returned, message, on_error):
    term = python_term(tmp_path, f"def f(completions): return {returned}")
    with scoring(term, on_error=on_error) as scorer, pytest.raises(RunError) as caught:
        scorer.score([asked("5", *"abcdefgh")])
    assert str(caught.value).startswith(f"reward term f {message}")
    assert "prompt row-0 (d.jsonl:1), step 7" in str(caught.value)


def test_one_call_sees_every_group_in_order(tmp_path):
    source = (
        "def f(completions, answer, level): return [len(completions) * 10 + int(a) + l for a, l in zip(answer, level)]"
    )
    groups = [asked(str(i), *"ab", index=i, level=i / 10) for i in range(3)]
    with scoring(python_term(tmp_path, source)) as scorer:
        assert values(scorer, groups, "f") == [[60.0] * 2, [61.1] * 2, [62.2] * 2]
    with scoring(python_term(tmp_path, source), workers=2) as scorer:  # shares of one and two groups
        assert values(scorer, groups, "f") == [[20.0] * 2, [41.1] * 2, [42.2] * 2]
    with scoring(python_term(tmp_path, source), workers=5) as scorer:
        assert values(scorer, groups, "f") == [[20.0] * 2, [21.1] * 2, [22.2] * 2]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 0.5, None, True], [1.0, 0.5, None, 1.0]),
        ((1, 2), [1.0, 2.0]),
        ([10**400], [float("inf")]),
    ],
)
def test_what_counts_as_a_list_of_numbers(returned, expected):
    assert checked(returned, len(expected)) == expected


def test_arrays_and_their_scalars_count():
    np = pytest.importorskip("numpy")
    assert checked(np.array([1, 2]), 2) == [1.0, 2.0]
    assert checked([np.float32(0.5), np.int64(3), np.array(2.0), None], 4) == [0.5, 3.0, 2.0, None]
    with pytest.raises(ContractError, match="2 dimensions"):
        checked(np.ones((2, 1)), 2)


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=6), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_anything_returned_is_numbers_or_a_broken_contract(returned, count):
    try:
        got = checked(returned, count)
    except ContractError:
        return
    assert len(got) == count
    assert all(value is None or type(value) is float for value in got)


STEPWISE = """
step = 0
def f(completions):
    global step
    step += 1
    return [1.0] * 6 if step != 2 else [1.0, 1.0, 1.0, 1.0, {value}, 0.0]
"""


@pytest.mark.parametrize("value", ["float('inf')", "-float('inf')", "float('nan')", "-1e200", "10**400"])
def test_a06_a_reward_that_is_not_finite_is_an_error_of_that_completion(tmp_path, value):
    term = python_term(tmp_path, STEPWISE.format(value=value))
    groups = [asked("5", *"abc", index=i) for i in range(2)]
    with scoring(term) as scorer:
        scorer.score(groups)
        with pytest.raises(RunError) as caught:
            scorer.score(groups)
    message = str(caught.value)
    assert message.startswith("reward term f failed on prompt row-1 (d.jsonl:2), completion 1, step 7: returned ")
    assert "reward.on_error=unscored" in message
    with scoring(term, on_error="unscored") as scorer:
        assert values(scorer, groups, "f") == [[1.0] * 3] * 2
        assert values(scorer, groups, "f") == [[1.0, 1.0, 1.0], [1.0, None, 0.0]]
        assert scorer.metrics()["reward/error_count"] == 1.0
        assert scorer.metrics()["reward/error_count"] == 0.0  # counts are those since the last call
    assert [c.reward for c in groups[1].completions] == [1.0, None, 0.0]


RAISES = """
def helper(text):
    raise ValueError("no judge for " + text)

def f(completions):
    return [helper(text) if text == "c" else 1.0 for text in completions]
"""


def test_a15_an_exception_names_term_prompt_and_cause(tmp_path):
    term = python_term(tmp_path, RAISES)
    groups = [asked("5", "a", "b", "c"), asked("5", "a", "b", index=1)]
    with scoring(term) as scorer, pytest.raises(RunError) as caught:
        scorer.score(groups)
    assert "reward term f failed on prompt row-0 (d.jsonl:1) and 1 more, step 7: ValueError" in str(caught.value)
    assert "ValueError: no judge for c (f_term.py:3)" in str(caught.value)
    with scoring(term, on_error="unscored") as scorer:
        assert values(scorer, groups, "f") == [[None] * 3, [None] * 2]
        assert scorer.metrics()["reward/error_count"] == 5.0
        assert values(scorer, groups[1:], "f") == [[1.0, 1.0]]
    with scoring(term, on_error="unscored", workers=2) as scorer:  # a share of the groups each
        assert values(scorer, groups, "f") == [[None] * 3, [1.0, 1.0]]


@pytest.mark.parametrize("on_error", ["abort", "unscored"])
def test_a15_a_function_that_sleeps_for_ever_is_unscored_never_an_abort(tmp_path, on_error):
    source = """
import time
def f(completions):
    if "sleep" in completions:
        time.sleep(10**6)
    return [1.0] * len(completions)
"""
    groups = [asked("5", "sleep", "b"), asked("5", "a", "b", index=1)]
    with scoring(python_term(tmp_path, source), timeout_s=0.5, on_error=on_error) as scorer:
        assert values(scorer, groups[:1], "f") == [[None, None]]
        assert values(scorer, groups[1:], "f") == [[1.0, 1.0]]
        assert scorer.metrics()["reward/timeout_count"] == 2.0


@pytest.mark.parametrize("bad", ["import nothing_of_this_name", "raise SystemExit(3)", "1 / 0"])
def test_a_file_that_cannot_be_loaded_ends_the_run(tmp_path, bad):
    term = python_term(tmp_path, f"{bad}\ndef f(completions): ...")
    with (
        scoring(term, on_error="unscored") as scorer,
        pytest.raises(RunError, match=r"reward term f: it cannot be loaded: .*\(f_term\.py:1\)"),
    ):
        scorer.score([asked("5", "a")])


def test_exit_inside_the_function_is_an_error(tmp_path):
    term = python_term(tmp_path, "import sys\ndef f(completions): sys.exit('enough')")
    with scoring(term, on_error="unscored") as scorer:
        assert values(scorer, [asked("5", "a")], "f") == [[None]]
        assert scorer.metrics()["reward/error_count"] == 1.0


def test_a_file_may_import_its_neighbours_and_keep_state(tmp_path):
    (tmp_path / "neighbour_of_f.py").write_text("seen = []")
    source = """
from neighbour_of_f import seen
print("on the console, not in the protocol")
def f(completions):
    print("neither this")
    seen.extend(completions)
    return [len(seen)] * len(completions)
"""
    with scoring(python_term(tmp_path, source)) as scorer:
        groups = [asked("5", "a", "b"), asked("5", "c", index=1)]
        assert values(scorer, groups[:1], "f") == [[2.0, 2.0]]
        assert values(scorer, groups[1:], "f") == [[3.0]]


def test_two_functions_of_one_name_are_told_apart_by_their_files(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    first = python_term(folders[0], "def f(completions): return [1.0] * len(completions)")
    second = python_term(folders[1], "def f(completions): return [2.0] * len(completions)")
    (folders[1] / "f_term.py").rename(folders[1] / "other.py")
    second["path"] = str(folders[1] / "other.py")
    with scoring(first, second) as scorer:
        (group,) = scorer.score([asked("5", "a")])
    assert group.completions[0].rewards == {"f_term.f": 1.0, "other.f": 2.0}


def test_importing_rewards_loads_nothing_heavy():
    heavy = ["torch", "transformers", "sympy", "math_verify", "reasoning_gym", "numpy"]
    code = f"import sys, grpo_cli.reward, grpo_cli.reward.check; print([n for n in {heavy} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
