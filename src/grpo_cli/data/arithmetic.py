"""What is a + b: problems that need no file."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Iterator

from grpo_cli.data.rows import Bad, Row
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.schema import ArithmeticData
from grpo_cli.seeds import derive_seed


class ArithmeticRows:
    """Distinct ordered pairs (a, b), drawn without replacement; the held-out ones come first in the draw.

    The draw depends on the operand range alone, not on `run.seed`: a model is never evaluated on problems that it
    was trained on under another seed. Raises ConfigError when the range holds fewer problems than asked for.
    """

    def __init__(self, cfg: ArithmeticData, split: str):
        wrong = misfit(cfg.train_size, cfg.eval_size, cfg.min_operand, cfg.max_operand)
        if wrong is not None:
            message, mended = wrong
            fix = f"data.max_operand={mended}"
            raise ConfigError(Finding("counts_in_range", ("data.max_operand", "data.min_operand"), message, fix))
        self.cfg = cfg
        self.split = split
        low, high = cfg.min_operand, cfg.max_operand
        width = high - low + 1
        generator = random.Random(derive_seed("arithmetic", low, high))
        eval_picks = generator.sample(range(width * width), cfg.eval_size)
        others = _others(generator, width * width, set(eval_picks), cfg.train_size)
        picks = eval_picks if split == "eval" else others
        self._pairs = [(low + pick // width, low + pick % width) for pick in picks]

    def scan(self) -> Iterator[Row | list[Bad]]:
        for index in range(len(self)):
            yield self.row(index)

    def row(self, index: int) -> Row:
        a, b = self._pairs[index]
        prompt = f"What is {a} + {b}? Answer with just the number."
        columns = {"prompt": prompt, "answer": str(a + b), "a": a, "b": b}
        return Row(prompt, str(a + b), columns, f"arithmetic {self.split} row {index}")

    def __len__(self) -> int:
        return len(self._pairs)

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self._pairs).encode()).hexdigest()


def _others(generator: random.Random, total: int, taken: set[int], count: int) -> list[int]:
    """`count` of the `total` numbers that are not `taken`, in random order."""
    drawn = generator.sample(range(total), min(total, count + len(taken)))
    return [pick for pick in drawn if pick not in taken][:count]


def misfit(train_size: int, eval_size: int, low: int, high: int) -> tuple[str, int] | None:
    """What is wrong with a range of operands, and the `data.max_operand` that mends it; None when the rows fit.

    >>> misfit(300, 100, 1, 20) is None, misfit(301, 100, 1, 20)[1]
    (True, 21)
    """
    asked = train_size + eval_size
    mended = low + math.isqrt(max(0, asked - 1))  # the smallest width whose square holds them
    if high < low:
        return f"data.max_operand={high} is below data.min_operand={low}.", mended
    problems = (high - low + 1) ** 2
    if problems > sys.maxsize:
        return f"Operands from {low} to {high} are too many to draw from.", low + 10**6
    if problems >= asked:
        return None
    rows = f"data.train_size={train_size} + data.eval_size={eval_size} = {asked} rows"
    return f"{rows}, but operands from {low} to {high} give only {problems} problems.", mended
