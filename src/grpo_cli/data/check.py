"""Reads all rows once: which are usable, and every finding of the section Data that needs the rows."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.data.arithmetic import ArithmeticRows
from grpo_cli.data.columns import Columns
from grpo_cli.data.encode import Encoder, template_missing
from grpo_cli.data.hf import HfRows
from grpo_cli.data.jsonl import JsonlRows
from grpo_cli.data.reasoning_gym import ReasoningGymRows
from grpo_cli.data.rows import Bad, Problems, Row, Rows, Rule
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.memory import read_positions
from grpo_cli.schema import ArithmeticData, Config, HfData, JsonlData, ReasoningGymData

BATCH = 4096
"""Prompts that are tokenised at once."""

RULES = {
    "data_rows_valid": Rule("cannot be read", "Repair the lines in the message."),
    "data_has_keys": Rule(
        "lack a column",
        "data.prompt_key and data.answer_key of the columns in the message (data.answer_key=null: no answers)",
        ("data.prompt_key", "data.answer_key"),
    ),
    "prompts_not_empty": Rule("have an empty prompt", "Remove the rows in the message."),
    "gold_answers_present": Rule(
        "have an empty answer, which a reward term reads",
        "Repair or remove the rows in the message.",
        ("reward.terms",),
    ),
    "text_free_of_control_characters": Rule(
        "hold U+0008 or U+000C, unescaped LaTeX", "Double the backslashes in the lines of the message."
    ),
    "answers_on_one_line": Rule(
        "have an answer with a tab or line break, often unescaped LaTeX",
        "Double the backslashes in the lines of the message.",
        severity="warning",
    ),
    "eval_rows_not_in_train": Rule(
        "are also in data.train", "Remove the rows in the message from one of the two.", ("data.eval",), "warning"
    ),
}


@dataclass
class Checked:
    """What one reading of the data found; the rows are there only when no finding is an error."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    train: Any = None
    eval: Any = None
    train_usable: Sequence[int] = ()
    eval_usable: Sequence[int] = ()


def error_findings(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]


def check(
    cfg: Config,
    encoder: Encoder | None,
    visit: Callable[[Row], None] | None = None,
    reads_answer: bool = False,
    command: str = "train",
) -> Checked:
    """Scans held-out and training rows; without an encoder nothing is tokenised.

    `visit` sees every readable row; `reads_answer` says that a term reads the answers beside those whose kind tells.
    """
    checked = Checked()
    train = _open(cfg, "train", checked.findings)
    held_out = _open(cfg, "eval", checked.findings)
    prompts: dict[int, str] = {}
    if held_out is not None:
        scan = _Scan(cfg, "data.eval", encoder, visit, reads_answer, command)
        scan.remember = prompts if cfg.data.eval != cfg.data.train or cfg.data.eval is None else None
        checked.eval_usable = scan.run(held_out, checked)
        checked.eval = held_out
    if train is not None:
        scan = _Scan(cfg, "data.train", encoder, visit, reads_answer, command)
        scan.known = prompts
        checked.train_usable = scan.run(train, checked)
        checked.train = train
        if not error_findings(checked.findings):
            checked.findings += _covers_one_step(cfg, command, len(train), len(checked.train_usable))
    return checked


def _covers_one_step(cfg: Config, command: str, rows: int, usable: int) -> list[Finding]:
    wanted = cfg.trainer.prompts_per_step
    if usable >= wanted:
        return []
    keys = ("trainer.prompts_per_step", "data.train", "data.max_prompt_tokens")
    message = f"data.train has {usable} usable prompts of {rows} rows, fewer than trainer.prompts_per_step={wanted}."
    if usable:
        fix = _completed(cfg, command, {"trainer.prompts_per_step": usable})
        return [Finding("data_covers_one_step", keys, message, fix)]
    if rows:
        message += f" No row is left: all have more than data.max_prompt_tokens={cfg.data.max_prompt_tokens} tokens."
        return [Finding("data_covers_one_step", keys[::-1], message, "Raise data.max_prompt_tokens.")]
    return [Finding("data_covers_one_step", keys[1:], message, "data.train of a file with rows")]


def _open(cfg: Config, split: str, findings: list[Finding]) -> Rows | None:
    key = f"data.{split}"
    name = cfg.data.train if split == "train" else cfg.data.eval
    try:
        return _rows(cfg, split, key, name)
    except ConfigError as error:
        if not any(finding in findings for finding in error.findings):
            findings += error.findings
    except OSError as error:
        message = f"{key}={name} cannot be opened: {error.strerror or error}."
        findings.append(Finding("data_file_readable", (key,), message, f"{key} of a file that can be read"))
    return None


def _rows(cfg: Config, split: str, key: str, name: str | None) -> Rows | None:
    data = cfg.data
    if isinstance(data, ArithmeticData):
        return ArithmeticRows(data, split)
    if isinstance(data, ReasoningGymData):
        return ReasoningGymRows(data, split, cfg.run.seed)
    if not name or not data.prompt_key:
        return None
    columns = Columns(data.prompt_key, data.answer_key or None)
    assert isinstance(data, JsonlData | HfData)
    if isinstance(data, JsonlData):
        return JsonlRows(name, columns)
    return HfRows(name, "train" if split == "train" else "test", key, columns)


class _Scan:
    """One pass over the rows of `key`."""

    known: dict[int, str] | None = None
    """Prompts (by hash) that must not be met here, with where they are."""
    remember: dict[int, str] | None = None
    """Where to note the prompts met here."""

    def __init__(
        self,
        cfg: Config,
        key: str,
        encoder: Encoder | None,
        visit: Callable[[Row], None] | None,
        reads_answer: bool,
        command: str,
    ):
        self.cfg = cfg
        self.command = command
        self.key = key
        self.encoder = encoder
        self.visit = visit
        self.limit = cfg.data.max_prompt_tokens
        self.problems = Problems(key)
        self.reads_answer = reads_answer or any(term.reads_answer for term in cfg.reward.terms)
        self.pending: list[tuple[int, Row]] = []
        self.long: dict[int, tuple[str, int]] = {}
        self.chat_without_template: str | None = None

    def run(self, rows: Rows, checked: Checked) -> Sequence[int]:
        for index, item in enumerate(rows.scan()):
            if isinstance(item, list):
                for bad in item:
                    self.problems.add(bad)
            else:
                self._see(index, item)
                if len(self.pending) >= BATCH:
                    self._measure()
        self._measure()
        checked.findings += self.problems.findings(RULES)
        if self.chat_without_template is not None:
            checked.findings.append(template_missing(f"{self.chat_without_template} is a chat list"))
        self._judge_length(len(rows), checked)
        if not self.long:
            return range(len(rows))
        return array("Q", (index for index in range(len(rows)) if index not in self.long))

    def _see(self, index: int, row: Row) -> None:
        answer = row.answer
        if answer is not None:
            if not answer.strip() and self.reads_answer:
                self.problems.add(Bad("gold_answers_present", row.source, "the answer is empty"))
            elif "\n" in answer or "\t" in answer or "\r" in answer:
                self.problems.add(Bad("answers_on_one_line", row.source, repr(answer[:40])))
        if self.known or self.remember is not None:
            self._compare(row)
        if self.visit is not None:
            self.visit(row)
        if self.encoder is not None:
            bound = self.encoder.at_most(row.prompt)
            if bound is None or bound > self.limit:
                self.pending.append((index, row))

    def _compare(self, row: Row) -> None:
        text = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, sort_keys=True)
        if self.known and (where := self.known.get(hash(text))) is not None:
            self.problems.add(Bad("eval_rows_not_in_train", where, f"the same prompt as {row.source}"))
        if self.remember is not None:
            self.remember[hash(text)] = row.source

    def _measure(self) -> None:
        encoder, pending, self.pending = self.encoder, self.pending, []
        if encoder is None or not pending:
            return
        if not encoder.templated:
            chats = [row for _, row in pending if not isinstance(row.prompt, str)]
            if chats and self.chat_without_template is None:
                self.chat_without_template = chats[0].source
            pending = [(index, row) for index, row in pending if isinstance(row.prompt, str)]
        for (index, row), (content, count) in zip(pending, self._counts(encoder, pending), strict=True):
            if content == 0:
                self.problems.add(Bad("prompts_not_empty", row.source, "the prompt tokenises to nothing"))
            elif count > self.limit:
                self.long[index] = (row.source, count)

    def _counts(self, encoder: Encoder, pending: list[tuple[int, Row]]) -> list[tuple[int, int]]:
        """(tokens of the prompt's own text, tokens after templating) of each row; (1, 0) for one that is refused."""
        try:
            return encoder.counts([row.prompt for _, row in pending])
        except ValueError as error:
            if len(pending) > 1:  # one by one tells which
                return [self._counts(encoder, [item])[0] for item in pending]
            self.problems.add(Bad("data_rows_valid", pending[0][1].source, str(error)))
            return [(1, 0)]

    def _judge_length(self, rows: int, checked: Checked) -> None:
        if not self.long:
            return
        if self.cfg.data.on_long_prompt == "drop":
            checked.notes.append(
                f"data.on_long_prompt=drop: {len(self.long)} of {rows} prompts of {self.key} have more than "
                f"data.max_prompt_tokens={self.limit} tokens and are left out."
            )
            return
        problems = Problems(self.key)
        for source, count in self.long.values():
            problems.add(Bad("prompts_fit", source, f"{count} tokens"))
        what = f"have more than data.max_prompt_tokens={self.limit} tokens after templating"
        keys = ("data.max_prompt_tokens", "data.on_long_prompt")
        longest = max(count for _, count in self.long.values())
        left = rows - len(self.long) if self.key == "data.train" else None
        rule = Rule(what, _fix_length(self.cfg, self.command, longest, left), keys)
        checked.findings += problems.findings({"prompts_fit": rule})


def _fix_length(cfg: Config, command: str, longest: int, left: int | None) -> str:
    """Overrides that let the longest prompt in, where the model has room for it, or leave `left` prompts.

    `left` is None where no step needs any. All that must change with them is in the fix.
    """
    from grpo_cli.checks.quantities import completion_limits  # not at the top: the rules import from this package

    positions = read_positions(cfg.model.path, cfg.model.revision)
    limits = completion_limits(cfg, command)
    fixes: list[dict[str, Any]] = []
    if positions is None or longest + max(limits.values()) <= positions:
        fixes.append({"data.max_prompt_tokens": longest})
    if left is None or left >= cfg.trainer.prompts_per_step:
        fixes.append({"data.on_long_prompt": "drop"})
    elif left:
        fixes.append({"data.on_long_prompt": "drop", "trainer.prompts_per_step": left})
    return ", or ".join(_completed(cfg, command, fix) for fix in fixes) or "Remove or shorten the rows in the message."


def _completed(cfg: Config, command: str, changes: dict[str, Any]) -> str:
    from grpo_cli.checks.engine import Changes
    from grpo_cli.checks.run import completed

    return completed(cfg, Changes(changes), command)
