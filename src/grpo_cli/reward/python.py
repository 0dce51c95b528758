"""Term `python`: a function of the user's own file, in a process of its own.

The parent only reads the file's syntax tree; the worker runs it.
"""

from __future__ import annotations

import ast
import importlib.util
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILT_IN = ("prompts", "completions", "answer", "completion_ids")
"""Arguments that the tool passes besides the columns of the data, each a list with one entry a completion."""


class ContractError(TypeError):
    """The function returned something other than one number or None a completion."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes by name."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_any: bool
    """`**kwargs`: it gets everything there is."""
    positional_only: tuple[str, ...] = ()
    """What no name reaches; `*args` too, but for a function that takes everything by `**kwargs`."""

    def wanted(self, available: Sequence[str]) -> list[str]:
        """Of the names that could be passed, those that are."""
        return [name for name in available if self.takes_any or name in self.required or name in self.optional]


def read_signature(path: str, function: str) -> Signature:
    """The signature of a function, from the file's text: nothing of it runs. ValueError with the reason, OSError."""
    try:
        tree = ast.parse(Path(path).read_bytes(), filename=path)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not Python: {error}") from error
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = [node for node in found if node.name == function]
    if not named:
        names = ", ".join(node.name for node in found) or "none"
        raise ValueError(f"{path} defines no function {function}; it defines: {names}")
    if isinstance(named[-1], ast.AsyncFunctionDef):
        raise ValueError(f"{function} in {path} is async; call asyncio.run inside a plain function")
    arguments = named[-1].args
    plain = [argument.arg for argument in arguments.args]
    with_default = plain[len(plain) - len(arguments.defaults) :] if arguments.defaults else []
    keyword = list(zip((argument.arg for argument in arguments.kwonlyargs), arguments.kw_defaults, strict=True))
    required = [name for name in plain if name not in with_default] + [name for name, value in keyword if value is None]
    optional = with_default + [name for name, value in keyword if value is not None]
    positional = [argument.arg for argument in arguments.posonlyargs]
    if arguments.vararg is not None and arguments.kwarg is None:
        positional.append(f"*{arguments.vararg.arg}")
    return Signature(tuple(required), tuple(optional), arguments.kwarg is not None, tuple(positional))


def make(options: Mapping[str, Any]) -> Callable[[tuple[Mapping[str, list[Any]], int]], list[float | None]]:
    """Loads the file; returns the scorer: (keyword arguments, number of completions) in, a number or None each out."""
    path = Path(options["path"])
    spec = importlib.util.spec_from_file_location(f"grpo_reward_{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # as `python FILE` does: it may import its neighbours
    spec.loader.exec_module(module)
    function = getattr(module, options["function"])
    return lambda request: checked(function(**request[0]), request[1])


def checked(result: Any, count: int) -> list[float | None]:
    """The returned values as a list of `count` floats and Nones; ContractError for anything else.

    A list, a tuple or a one-dimensional array is taken. Infinite and NaN values pass: the caller refuses them.
    """
    if getattr(result, "ndim", None) == 1 and hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        shape = f" of {result.ndim} dimensions" if hasattr(result, "ndim") else ""
        raise ContractError(f"returned a {type(result).__name__}{shape}, not a list of numbers")
    if len(result) != count:
        raise ContractError(f"returned {len(result)} rewards for {count} completions")
    return [_number(value, index) for index, value in enumerate(result)]


def _number(value: Any, index: int) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise ContractError(f"returned a {type(value).__name__} as reward {index}, not a number or None")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def describe(error: BaseException, path: str) -> str:
    """`ValueError: text (file.py:12)`: the last place in the user's own file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" ({Path(path).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
