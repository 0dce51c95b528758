"""Term `math`: the tables of section H, in place; threads, processes and hostile text, through the workers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards import asked, scoring, values

from grpo_cli.reward import math

MATH = {"name": "math"}


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0.0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{2}", 0.0),  # unclosed: no answer
        ("42", r"\boxed{42", 0.0),
        (r"\boxed{\{1,2\}}", r"\boxed{\{1,2\}}", 1.0),
        (r"\{1,2\}", r"\boxed{\{1,2\}}", 1.0),
        (r"\boxed{\text{a}}", r"\boxed{\text{a}}", 1.0),
        (r"\text{a}", r"\boxed{\text{b}}", 0.0),
        ("5", r"\boxed{\boxed{5}}", 1.0),
        ("5", r"\boxed", 0.0),
        ("5", r"\boxed 5", 0.0),
        (r"\frac{1}{2}", r"\fbox{0.5}", 1.0),
    ],
)
def test_h01_nested_braces(gold, text, value):
    assert math.grade(gold, text) == value


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("2", r"I think \boxed{1}. No wait, it is \boxed{2}.", 1.0),
        ("1", r"I think \boxed{1}. No wait, it is \boxed{2}.", 0.0),
        ("2", r"\boxed{2} and again \boxed{2}", 1.0),
        ("3", 'He said "\\boxed{1}" but the answer is \\boxed{3}', 1.0),
        ("1", r"\boxed{1} and then \boxed{2", 0.0),  # the last one decides, and it is not closed
    ],
)
def test_h02_the_last_box_decides(gold, text, value):
    assert math.grade(gold, text) == value


H04 = [
    ("35", r"35\text{ cm}", 1.0),
    ("5", r"\$5", 1.0),
    ("1234", "1,234", 1.0),
    ("1234567", "1{,}234{,}567", 1.0),
    ("16", "016", 1.0),
    ("7", "+7", 1.0),
    ("-3", "-3.0", 1.0),
    ("1/2", "0.5", 1.0),
    (r"28\%", "28", 1.0),
    (r"28\%", "0.28", 1.0),
    ("28", r"28\%", 1.0),
    ("1,234", "(1,234)", 0.0),
    ("28", "0.28", 0.0),
    (r"28\%", r"28\%", 1.0),
    (r"28\%", r"0.28\%", 0.0),  # a sign on both sides: nothing to choose
    ("0.28", r"28\%", 1.0),
    ("28%", r"\frac{28}{100}", 1.0),
]


@pytest.mark.parametrize("form", ["{}", r"\boxed{{{}}}", r"So it is \boxed{{{}}}."], ids=["bare", "boxed", "sentence"])
@pytest.mark.parametrize(("gold", "prediction", "value"), H04)
def test_h04_percent_units_currency_separators(gold, prediction, value, form):
    assert math.grade(gold, form.format(prediction)) == value


@pytest.mark.parametrize(
    ("gold", "prediction", "value"),
    [("x=5", "5", 1.0), ("5", "x=5", 1.0), ("(1,2)", "(1,2)", 1.0), ("(1,2)", "(2,1)", 0.0), ("x=5", "y=5", 0.0)],
)
def test_h06_table(gold, prediction, value):
    assert math.grade(gold, rf"\boxed{{{prediction}}}") == value


def test_h06_the_gold_comes_first(monkeypatch):
    import math_verify

    calls = []
    monkeypatch.setattr(math_verify, "verify", lambda *given, **_: calls.append(given) or True)
    math.parse_gold.cache_clear()
    assert math.grade("3", r"\boxed{4}") == 1.0
    assert calls == [([3], [4])]


@pytest.mark.parametrize("gold", ["", "  ", r"\boxed{}", "see figure", r"\boxed{see figure}", r"\frac{1}{", "}{", "$$"])
def test_h10_a_gold_that_cannot_be_parsed_scores_nobody(gold):
    assert math.parse_gold(gold) == []
    assert math.grade(gold, r"\boxed{3}") is None
    assert math.grade(gold, rf"\boxed{{{gold}}}") is None
    assert math.grade(None, r"\boxed{3}") is None


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("7", "The answer is $7$.", 1.0),
        ("7", "First 3. So the final answer is 7.", 1.0),
        ("8", "First 3. So the final answer is 7.", 0.0),
        ("28", "The answer is 28%.", 1.0),
        ("1/2", "the result is $\\frac{1}{2}$", 1.0),
        ("7", "", 0.0),
        ("7", "I do not know", 0.0),
        ("$2x+1$", r"$1+2x$", 1.0),
        ("x^2-1", r"\boxed{(x-1)(x+1)}", 1.0),
        (r"\frac{\sqrt{3}}{2}", r"\boxed{\sqrt{3}/2}", 1.0),
    ],
)
def test_answers_without_a_box_and_forms(gold, text, value):
    assert math.grade(gold, text) == value


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\{}", r"\{"),
        (r"\boxed{\\}", r"\\"),
        (r"\boxed {1}", "1"),
        (r"\boxedx{1}", None),
        (r"\boxed{{}", ""),
        ("\\boxed{1}" * 1000 + "\\boxed{2}", "2"),
    ],
)
def test_last_boxed(text, content):
    assert math.last_boxed(text) == content


@given(st.text(alphabet=r"\{}boxed$%^_12+-=,. frac/()[]&", max_size=60), st.sampled_from(["7", r"\frac{1}{2}", "x"]))
@settings(max_examples=60, deadline=None)
def test_any_text_gets_a_value_and_never_raises(text, gold):
    """Powers of powers are left out: they take for ever, which is what the worker's time limit is for."""
    if text.count("^") < 2 and "**" not in text:
        assert math.grade(gold, text) in (0.0, 1.0, None)


def _grade_once(_: int = 0) -> float | None:
    with scoring(MATH) as scorer:
        return values(scorer, [asked("1/3", r"\boxed{1/3}")], "math")[0][0]


def test_h07_main_thread_threads_and_asyncio():
    with scoring(MATH, workers=2) as scorer:

        def grade(_: int = 0) -> float | None:
            return values(scorer, [asked("1/3", r"\boxed{1/3}")], "math")[0][0]

        async def in_a_loop() -> list[float | None]:
            return [grade(), await asyncio.to_thread(grade)]

        assert grade() == 1.0
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(grade, range(6))) == [1.0] * 6
        assert asyncio.run(in_a_loop()) == [1.0, 1.0]


def test_h07_inside_a_process_pool_and_with_several_workers():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        assert list(processes.map(_grade_once, range(1))) == [1.0]
    with scoring(MATH, workers=3) as scorer:
        groups = [asked("2", r"\boxed{1}", r"\boxed{2}", "", index=i) for i in range(4)]
        assert values(scorer, groups, "math") == [[0.0, 1.0, 0.0]] * 4


def test_no_worker_at_all_is_refused():
    from grpo_cli.checks import check

    resolved = asdict_config(workers=0)
    _, findings = check(resolved, "train")
    assert "counts_in_range" in [finding.rule for finding in findings]


def asdict_config(**changes) -> dict:
    from rewards import reward_config

    resolved = reward_config(MATH).model_dump()
    resolved["reward"] |= changes
    return resolved


@pytest.mark.parametrize("order", ["hydra, math_verify", "math_verify, hydra"])
def test_h11_results_do_not_depend_on_who_loads_the_grammar_runtime_first(order):
    rows = [(gold, prediction, value) for gold, prediction, value in H04]
    code = f"import {order}\nfrom grpo_cli.reward.math import grade\nprint([grade(g, p) == v for g, p, v in {rows!r}])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout == f"{[True] * len(rows)}\n", out.stderr


HOSTILE = [
    '__import__("pathlib").Path("SENTINEL").touch()',
    '[[open("SENTINEL", "w")]]',
    '().__class__.__base__.__subclasses__()[0]("SENTINEL")',
    r'\text{__import__("os").system("touch SENTINEL")}',
    "lambda: exec(\"open('SENTINEL', 'w')\")",
    r"\begin{pmatrix} open(\"SENTINEL\", \"w\") \end{pmatrix}",
    "9**9**9**9",
    r"9^{9^{9^{9}}}",
    "(" * 500 + ")" * 500,
    "\\frac{" * 200 + "1" + "}" * 200,
    "\x00\ud7ff￾",
]


def test_l03_model_text_is_never_run(tmp_path, monkeypatch):
    sentinel = tmp_path / "SENTINEL"
    monkeypatch.chdir(tmp_path)
    texts = [text.replace("SENTINEL", str(sentinel)) for text in HOSTILE]
    texts = [rf"\boxed{{{text}}}" for text in texts] + texts[:4] + [f"The answer is ${text}$." for text in texts[:4]]
    terms = [MATH, {"name": "exact"}, {"name": "number"}, {"name": "regex", "pattern": "[0-9]+$"}]
    with scoring(*terms, timeout_s=1.0, workers=2) as scorer:
        groups = [
            asked("7", *texts),
            *(asked(text, rf"\boxed{{{text}}}", index=i + 1) for i, text in enumerate(HOSTILE[:6])),
        ]
        scorer.score(groups)
    assert all(c.rewards["math"] in (0.0, 1.0, None) for group in groups for c in group.completions)
    assert [c.rewards["math"] for c in groups[0].completions if c.rewards["math"] == 1.0] == []
    assert list(tmp_path.iterdir()) == []


def test_a_power_tower_costs_its_own_completion_only():
    with scoring(MATH, timeout_s=1.0) as scorer:
        ((tower, good),) = values(scorer, [asked("7", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{7}")], "math")
        assert tower in (0.0, None)
        assert good == 1.0
