"""What a model wrote is a value or a formula, or a ValueError; it is never run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards import asked, scoring, values
from sympy import Symbol, parse_expr
from sympy.parsing import sympy_parser

from grpo_cli.reward.formulas import Formulas, plain_value

HOSTILE = [
    "__import__('pathlib').Path('SENTINEL').touch()",
    "[open('SENTINEL', 'w')]",
    "open('SENTINEL', 'w')",
    "[].__class__.__base__.__subclasses__()",
    "(lambda: open('SENTINEL', 'w'))()",
    "[open(name, 'w') for name in ['SENTINEL']]",
    "f\"{open('SENTINEL', 'w')}\"",
    "exec(\"open('SENTINEL', 'w')\")",
    "sin(\"__import__('pathlib').Path('SENTINEL').touch()\")",
    "sympify(\"open('SENTINEL', 'w')\")",
    "S(\"open('SENTINEL', 'w')\")",
    "lambdify(x, \"open('SENTINEL', 'w')\")(1)",
    "Symbol('x').__init__.__globals__",
    "max(open, key=open)",
]


@pytest.fixture(autouse=True)
def sentinel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def narrowed(monkeypatch):
    monkeypatch.setattr(sympy_parser, "eval_expr", Formulas(sympy_parser.eval_expr))


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("[[0, 1], [1, 0]]", [[0, 1], [1, 0]]),
        (" ['a', 'b']\n", ["a", "b"]),
        ("(0x3f & ~0x12) << 2 | 1", (0x3F & ~0x12) << 2 | 1),
        ("-3 + 4 * (2 - 7) // 2", -13),
        ("{'a': 1.5, 'b': None}", {"a": 1.5, "b": None}),
    ],
)
def test_values_are_read(source, value):
    assert plain_value(source) == value


@pytest.mark.parametrize("source", [*HOSTILE, "x", "1 if 2 else 3", "a := 2", "[1][0]", "", "[1, 2"])
def test_nothing_else_is_a_value(source):
    with pytest.raises((ValueError, SyntaxError)):
        plain_value(source)


FORMULAS = [
    *("2*x + 1", "sin(x)**2/2 + log(x)*3", "sqrt(2)*exp(-x) + C", "(3 + 4)*2 - 1/5", "Abs(x) + pi/2", "x! + 3"),
    *("atan(2*x)/Max(x, 1)", "0.5*x", "y*z**2"),
]


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_are_parsed_as_before(monkeypatch, text):
    names = {"x": Symbol("x"), "C": Symbol("C")}
    before = parse_expr(text, local_dict=dict(names))
    monkeypatch.setattr(sympy_parser, "eval_expr", Formulas(sympy_parser.eval_expr))
    assert parse_expr(text, local_dict=dict(names)) == before


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_else_is_a_formula(narrowed, text):
    with pytest.raises((ValueError, SyntaxError, TypeError)):
        parse_expr(text)


@given(st.text(alphabet="xS(\"').,_[]{}:=lambd open*+1", max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_value_or_refused(text):
    try:
        plain_value(text)
    except (ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        return


@pytest.mark.parametrize("task", ["n_queens", "countdown", "polynomial_multiplication", "binary_matrix"])
def test_l03_tasks_that_evaluate_an_answer_never_run_it(task):
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset(task, seed=1, size=1)[0]
    texts = [entry["answer"], *HOSTILE[:9], *(f"<answer>{text}</answer>" for text in HOSTILE[:4])]
    with scoring({"name": "reasoning_gym"}, timeout_s=60.0) as scorer:
        group = asked(entry["answer"], *texts, question=entry["question"], metadata=entry["metadata"])
        (got,) = values(scorer, [group], "reasoning_gym")
    assert got[0] == 1.0
    assert all(value is None or value < 0.1 for value in got[1:])
