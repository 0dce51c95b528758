"""Term `exact`: the completion is the answer, apart from white space around it."""

from __future__ import annotations


def grade(answer: str | None, text: str) -> float | None:
    """1.0 or 0.0; None where the row has no answer.

    >>> grade("5", " 5\\n"), grade("5", "It is 5"), grade(None, "5")
    (1.0, 0.0, None)
    """
    return None if answer is None else float(text.strip() == answer.strip())
