"""What is a + b: problems that need no file."""

from __future__ import annotations

import hashlib
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
        findings = check_range(cfg)
        if findings:
            raise ConfigError(findings)
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


def check_range(cfg: ArithmeticData) -> list[Finding]:
    """Rule `arithmetic_range_holds_rows`: the operand range has as many problems as rows are asked for."""
    width = cfg.max_operand - cfg.min_operand + 1
    problems = max(0, width) ** 2
    asked = cfg.train_size + cfg.eval_size
    keys = ("data.train_size", "data.eval_size", "data.min_operand", "data.max_operand")
    rule = "arithmetic_range_holds_rows"
    if cfg.train_size < 1 or cfg.eval_size < 0:
        message = f"data.train_size={cfg.train_size} and data.eval_size={cfg.eval_size} are no numbers of rows."
        return [Finding(rule, keys, message, "data.train_size=300 data.eval_size=100")]
    if problems > sys.maxsize:
        message = f"Operands from {cfg.min_operand} to {cfg.max_operand} are too many to draw from."
        return [Finding(rule, keys[2:], message, "data.min_operand=1 data.max_operand=1000000")]
    if problems >= asked:
        return []
    needed = 1
    while needed**2 < asked:
        needed += 1
    message = (
        f"data.train_size={cfg.train_size} + data.eval_size={cfg.eval_size} = {asked} rows, but operands from "
        f"{cfg.min_operand} to {cfg.max_operand} give only {problems} problems."
    )
    return [Finding(rule, keys, message, f"data.max_operand={cfg.min_operand + needed - 1}")]
