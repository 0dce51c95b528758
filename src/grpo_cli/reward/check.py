"""What can be known about the reward terms before weights are loaded, with the rows of the data at hand."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, Protocol

from grpo_cli.errors import Finding, RunError
from grpo_cli.reward import number, reasoning_gym
from grpo_cli.reward.pool import Failure, Job, Pool
from grpo_cli.reward.python import BUILT_IN, Signature, read_signature
from grpo_cli.reward.terms import MEMORY_BYTES
from grpo_cli.schema import Config, MathTerm, NumberTerm, PythonTerm, ReasoningGymTerm

PARSED = 2000
"""Distinct answers, beside plain numbers, that Math-Verify is asked about: some milliseconds each."""
PLAIN = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?|[0-9]+/[0-9]+")
"""Answers that Math-Verify surely parses."""
PACKAGES = {
    MathTerm: ("math_verify", "pip install math-verify==0.9.0"),
    ReasoningGymTerm: ("reasoning_gym", "pip install 'grpo[reasoning_gym]'"),
}


FILES = ("jsonl", "hf")
"""Data whose answers come from a column."""


class Row(Protocol):
    """What is looked at of a row of the data."""

    @property
    def answer(self) -> str | None: ...
    @property
    def columns(self) -> Any: ...
    @property
    def source(self) -> str: ...


class RewardCheck:
    """Rules of the section Reward that need the rows: pass every row to `see`, then ask for `findings`.

    >>> check = RewardCheck(cfg)                                           # doctest: +SKIP
    >>> findings = data.inspect(cfg, tokenizer, check.see) + check.findings()  # doctest: +SKIP
    """

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._python = [
            (index, term, _signature(term))
            for index, term in enumerate(cfg.reward.terms)
            if isinstance(term, PythonTerm)
        ]
        kinds = {type(term) for term in cfg.reward.terms}
        self._number = NumberTerm in kinds
        self._math = MathTerm in kinds and _installed("math_verify")
        self._gym = ReasoningGymTerm in kinds
        self._columns: tuple[str, ...] | None = None
        self._no_numbers = 0
        self._first_no_number = ""
        self._not_gym: str | None = None
        self._to_parse: dict[str, str] = {}

    def see(self, row: Row) -> None:
        """Takes note of one row."""
        if self._columns is None:
            self._columns = tuple(row.columns)
        if self._gym and self._not_gym is None and reasoning_gym.source(row.columns) is None:
            self._not_gym = row.source
        answer = row.answer
        if answer is None or not answer.strip():
            return
        if self._number and number.whole(answer) is None:
            self._no_numbers += 1
            self._first_no_number = self._first_no_number or f"{row.source}: {answer[:40]!r}"
        if self._math and len(self._to_parse) < PARSED and not PLAIN.fullmatch(answer):
            self._to_parse.setdefault(answer, row.source)

    def findings(self) -> list[Finding]:
        """All findings on the terms; nothing of a user's file is run."""
        return [*self._callables(), *self._answers(), *self._packages(), *self._gym_rows(), *self._gold()]

    @property
    def reads_answer(self) -> bool:
        """Whether a python term cannot do without the answer."""
        return bool(self._answer_readers())

    def _answer_readers(self) -> list[int]:
        return [i for i, _, found in self._python if isinstance(found, Signature) and "answer" in found.required]

    def _callables(self) -> list[Finding]:
        found = []
        for index, term, signature in self._python:
            reason = signature if isinstance(signature, str) else self._unknown(term, signature)
            if reason is not None:
                keys = (f"reward.terms.{index}.path", f"reward.terms.{index}.function")
                message = f"reward term {self._cfg.reward.term_names[index]}: {reason}."
                fix = "Correct path, function or the signature."
                found.append(Finding("python_reward_callable", keys, message, fix))
        return found

    def _unknown(self, term: PythonTerm, signature: Signature) -> str | None:
        if self._columns is None:  # no row could be read: only that is worth telling
            return None
        available = [*BUILT_IN, *(name for name in self._columns if name not in BUILT_IN)]
        unknown = [name for name in signature.required if name not in available]
        if not unknown:
            return None
        return f"{term.function} asks for {', '.join(unknown)}; what can be passed is {', '.join(available)}"

    def _answers(self) -> list[Finding]:
        data = self._cfg.data
        readers = self._answer_readers()
        if data.answer_key or data.name not in FILES or not readers:
            return []
        name = self._cfg.reward.term_names[readers[0]]
        message = f"The term {name} takes the answer, and data.answer_key, the column that it comes from, is empty."
        columns = [column for column in self._columns or () if column != data.prompt_key]
        named = "answer" in columns or not columns
        fix = "data.answer_key=answer" if named else f"data.answer_key of one of the columns {', '.join(columns)}"
        keys = ("data.answer_key", "reward.terms", "data.name")
        return [Finding("answer_reward_needs_answer_key", keys, message, f"{fix}, or answer=None in the signature")]

    def _packages(self) -> list[Finding]:
        found = []
        for index, term in enumerate(self._cfg.reward.terms):
            package, fix = PACKAGES.get(type(term), (None, ""))
            if package is not None and not _installed(package):
                message = f"reward term {term.name} needs the package {package}, which is not installed."
                found.append(Finding("reward_packages_installed", (f"reward.terms.{index}",), message, fix))
        return found

    def _gym_rows(self) -> list[Finding]:
        if self._not_gym is None:
            return []
        message = f"reward term reasoning_gym scores rows that its package made; {self._not_gym} has no source_dataset."
        keys = ("reward.terms", "data.name")
        return [Finding("data_has_keys", keys, message, "data=reasoning_gym, or another term")]

    def _gold(self) -> list[Finding]:
        found = []
        if self._no_numbers:
            found.append(_unparsed("number", self._no_numbers, self._first_no_number))
        bad = self._unparsed_mathematics()
        if bad:
            answer = bad[0]
            first = f"{self._to_parse[answer]}: {answer[:40]!r}"
            tried = f" (of the first {PARSED})" if len(self._to_parse) == PARSED else ""
            found.append(_unparsed("math", len(bad), first, tried))
        return found

    def _unparsed_mathematics(self) -> list[str]:
        """Answers that the term cannot parse, asked in a worker like everything that goes to sympy."""
        if not self._to_parse:
            return []
        answers = list(self._to_parse)
        timeout = self._cfg.reward.timeout_s or 10.0
        pool = Pool("math", Job("math", {"check": True}, MEMORY_BYTES), self._cfg.reward.workers, timeout)
        try:
            replies = pool.run([(answer,) for answer in answers])
        except RunError:  # a broken installation: the run itself will say so
            return []
        finally:
            pool.close()
        return [a for a, reply in zip(answers, replies, strict=True) if isinstance(reply, Failure) or reply[0] != 1.0]


def _signature(term: PythonTerm) -> Signature | str:
    """What the function takes, or why it cannot be called."""
    try:
        signature = read_signature(str(Path(term.path).expanduser()), term.function)
    except OSError as error:
        return f"{term.path} cannot be read: {error.strerror or error}"
    except ValueError as error:
        return str(error)
    if signature.positional_only:
        names = ", ".join(signature.positional_only)
        return f"{term.function} takes {names} by position only; arguments are passed by name"
    return signature


def _unparsed(term: str, count: int, first: str, tried: str = "") -> Finding:
    answers = "1 answer" if count == 1 else f"{count} answers"
    message = (
        f"{answers}{tried} that reward term {term} cannot parse; the first is {first}. Completions of such rows stay "
        "unscored, so their group is dropped each time."
    )
    keys = ("data.answer_key", "reward.terms")
    return Finding("gold_answers_parse", keys, message, "Repair or remove those rows.", "warning")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
