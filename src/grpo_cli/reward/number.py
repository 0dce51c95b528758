"""Term `number`: the last number of the completion is the whole number that the answer is.

Numbers are compared as text, so none is too long. A sign counts where no operand stands before it (`5-3` ends in 3,
`= -3` in -3); `1,234` is one number; `7.0` is 7, and `7.5` is no whole number.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?:(?<![\w)\]}])[+\-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def grade(answer: str | None, text: str) -> float | None:
    """1.0 or 0.0; None where the answer is no whole number.

    >>> grade("7", "3 + 4 = 7."), grade("7", "7 or 8"), grade("-1234", "-1,234"), grade("seven", "7")
    (1.0, 0.0, 1.0, None)
    """
    gold = whole(answer)
    if gold is None:
        return None
    found = NUMBER.findall(text)
    return float(bool(found) and whole(found[-1]) == gold)


def whole(text: str | None) -> str | None:
    """The whole number that a text is, in one spelling: no plus, separators, leading zeros or .0; None for others.

    >>> whole(" +016 "), whole("1,234.0"), whole("-0"), whole("7.5"), whole("7 cm")
    ('16', '1234', '0', None, None)
    """
    if text is None or not (found := NUMBER.fullmatch(text.strip())):
        return None
    digits, _, fraction = found.group().partition(".")
    if fraction.strip("0"):
        return None
    magnitude = digits.lstrip("+-−").replace(",", "").lstrip("0") or "0"
    return f"-{magnitude}" if digits[0] in "-−" and magnitude != "0" else magnitude
