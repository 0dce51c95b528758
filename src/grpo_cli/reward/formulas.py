"""`eval` and sympy's parser, narrowed to plain values and formulas.

Tasks of reasoning-gym call both on what a model wrote. Python's own would run any code in it; here a call, an
attribute or a name that is no part of a formula is a ValueError, and so the answer is a wrong one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

PLAIN = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load),
    *(ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
)
"""Nodes of a value that is written out, arithmetic included."""

FORMULA = (*PLAIN, ast.Name, ast.Call, ast.keyword, ast.Compare, ast.cmpop)
"""Nodes of what sympy makes of a formula: `Integer(2)*sin(Symbol('x'))`. Names are judged one by one."""

FUNCTIONS = ("sqrt", "cbrt", "root", "real_root")
"""Of sympy's functions those that are no class and stand in formulas; many others run code that they are given."""


def narrow(package: str) -> None:
    """From now on in this process, sympy parses formulas only, and `eval` in the loaded modules of `package` is
    `plain_value`."""
    from sympy.parsing import sympy_parser

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            vars(module)["eval"] = plain_value
    if not isinstance(sympy_parser.eval_expr, Formulas):
        sympy_parser.eval_expr = Formulas(sympy_parser.eval_expr)


def plain_value(source: str, *_: Any) -> Any:
    """The value of an expression of constants, lists, tuples, sets, dicts and arithmetic; ValueError for others.

    >>> plain_value("[[0, 1], [2 + 3, -1]]")
    [[0, 1], [5, -1]]
    """
    tree = ast.parse(source.strip(), mode="eval")
    _require(tree, PLAIN)
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})


class Formulas:
    """sympy's `eval_expr`, behind a look at the code that it is to evaluate."""

    def __init__(self, evaluate: Callable[..., Any]):
        self._evaluate = evaluate

    def __call__(self, code: Any, local_dict: Mapping[str, Any], global_dict: Mapping[str, Any]) -> Any:
        if not isinstance(code, str):
            raise ValueError("compiled code is no formula")
        tree = ast.parse(code.strip(), mode="eval")
        _require(tree, FORMULA)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
                raise ValueError("a formula calls functions by their names")
            if isinstance(node, ast.Name) and node.id not in local_dict and node.id not in _names():
                raise ValueError(f"{node.id} is no part of a formula")
        return self._evaluate(code, local_dict, global_dict)


def _require(tree: ast.AST, allowed: tuple[type, ...]) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, allowed):
            raise ValueError(f"{type(node).__name__} is no part of it")


@cache
def _names() -> frozenset[str]:
    """sympy's constants and the classes of its expressions. Strings that these are given are parsed in the same way."""
    import sympy

    kinds = {
        name
        for name, value in vars(sympy).items()
        if isinstance(value, sympy.Basic) or (isinstance(value, type) and issubclass(value, sympy.Basic))
    }
    return frozenset(kinds | set(FUNCTIONS)) - {"Lambda"}
