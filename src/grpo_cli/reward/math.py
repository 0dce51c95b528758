"""Term `math`: the last boxed answer equals the gold one, judged by Math-Verify.

Runs in a worker process, whose caller owns the time limit: Math-Verify's own is a signal, which works in the main
thread alone. Model text goes through the LaTeX grammar, or through sympy's expression parser when it consists of digits
and operators only; nothing else of it is ever evaluated.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

TAIL = 4000
"""Characters from the end of a completion without a box in which an answer is looked for."""
BARE = 100
"""A completion without a box that is one line of at most so many characters, and no sentence, is itself the answer."""

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|percent)\s*\}|percent)\s*$")
COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+")
WORD = re.compile(r"[a-zA-Z]{3,}")
SHORT_WORD = re.compile(r"[a-zA-Z]{2,}")
FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "lim", "max", "min", "gcd", "lcm", "mod"]
)


def make(options: Mapping[str, Any]) -> Callable[[tuple[str | None, str]], list[float | None]]:
    """The grader of (gold, completion). With `options["check"]` it tells whether the gold parses instead: 1.0, 0.0."""
    import math_verify  # noqa: F401  the slow import belongs to the start, not to the first completion's time limit

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    if options.get("check"):
        return lambda request: [float(bool(parse_gold(request[0] or "")))]
    return lambda request: [grade(*request)]


def grade(gold: str | None, text: str) -> float | None:
    """1.0 or 0.0; None where the gold cannot be parsed, or where Math-Verify fails: that is no wrong answer.

    The last box decides; an unclosed one is no answer. Without a box, the whole of a short line, or else what
    Math-Verify finds in the text. A percent sign on one side may be dropped or read as 1/100.
    """
    from math_verify import verify

    parsed = parse_gold(gold or "")
    if not parsed:
        return None
    try:
        answers, percent = _answers(text)
        gold_percent = _is_percent(_content(gold or ""))
        if percent and not gold_percent:
            answers = _with_hundredth(answers)
        golds = _with_hundredth(parsed) if gold_percent and not percent else parsed
        return float(bool(answers) and verify(golds, answers, timeout_seconds=None, raise_on_error=True))
    except Exception:  # a failed grader is no wrong answer: not scored, and counted
        return None


@lru_cache(maxsize=1024)
def parse_gold(gold: str) -> list[Any]:
    """The gold answer as sympy expressions; empty when it cannot be parsed: blank, unbalanced, or prose."""
    content = _content(gold)
    if not content.strip() or not balanced(content) or is_prose(content):
        return []
    return _parse_boxed(PERCENT.sub("", content))


def _content(gold: str) -> str:
    boxed = last_boxed(gold)
    return gold.strip().strip("$") if boxed is None else boxed


def _is_percent(content: str) -> bool:
    return PERCENT.search(content) is not None


def _answers(text: str) -> tuple[list[Any], bool]:
    """(what the completion answers, as sympy expressions; whether a percent sign stood behind it)."""
    content = last_boxed(text)
    if content is None:
        line = text.strip()
        if not is_bare(line):
            return _parse_text(text[-TAIL:])
        content = line.strip("$") if line.count("$") == 2 else line
    if not balanced(content):
        return [], False
    return _parse_boxed(PERCENT.sub("", content)), _is_percent(content)


def _parse_boxed(content: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    only_latex = [LatexExtractionConfig(boxed_match_priority=0)]
    boxed = rf"\boxed{{{content}}}"
    return parse(boxed, only_latex, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]


def _parse_text(text: str) -> tuple[list[Any], bool]:
    from math_verify import parse

    text = text.rstrip(" .\n")
    found = parse(
        PERCENT.sub("", text),
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,  # type: ignore[arg-type]
    )
    return found, _is_percent(text)


def _with_hundredth(expressions: list[Any]) -> list[Any]:
    return [*expressions, *(expression / 100 for expression in expressions if hasattr(expression, "is_number"))]


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}`; "" when that one is not closed; None without any.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{42"), last_boxed("42")
    ('\\frac{1}{2}', '', None)
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    found, depth = boxes[-1], 0
    for index in range(found.end(), len(text)):
        if text[index] in "{}" and not _escaped(text, index):
            depth += 1 if text[index] == "{" else -1
        if depth == 0:
            return text[found.end() + 1 : index]
    return ""


def balanced(text: str) -> bool:
    """Whether every brace that is not escaped has its partner."""
    depth = 0
    for index, letter in enumerate(text):
        if letter in "{}" and not _escaped(text, index):
            depth += 1 if letter == "{" else -1
            if depth < 0:
                return False
    return depth == 0


def _escaped(text: str, index: int) -> bool:
    backslashes = 0
    while backslashes < index and text[index - 1 - backslashes] == "\\":
        backslashes += 1
    return backslashes % 2 == 1


def is_bare(text: str) -> bool:
    r"""Whether a completion without a box is an answer and nothing else: one short line, no words between others.

    >>> is_bare(r"35\text{ cm}"), is_bare("x = 5"), is_bare("Friday"), is_bare("It is 7"), is_bare("")
    (True, True, True, False, False)
    """
    if not 0 < len(text) <= BARE or "\n" in text:
        return False
    plain = COMMAND.sub(" ", text).split()
    return len(plain) == 1 or not any(SHORT_WORD.search(part) and part not in FUNCTIONS for part in plain)


def is_prose(text: str) -> bool:
    r"""Whether a text is words rather than mathematics: two plain words of three letters or more outside `\text{…}`.

    >>> is_prose("see figure"), is_prose(r"2 \sin x \text{ see figure}"), is_prose("Friday"), is_prose("log x + max y")
    (True, False, False, False)
    """
    words = WORD.findall(COMMAND.sub(" ", text))
    return len([word for word in words if word.lower() not in FUNCTIONS]) >= 2
