"""Prompts for the loop: read, checked, shuffled and counted out by a cursor that survives a restart."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from grpo_cli.data.check import Checked, check, error_findings
from grpo_cli.data.encode import Encoder
from grpo_cli.data.rows import Row, Rows
from grpo_cli.errors import ConfigError, Finding, RunError
from grpo_cli.schema import Config
from grpo_cli.seeds import derive_seed
from grpo_cli.types import Prompt


class Data:
    """The training prompts as one stream of seeded epochs, and the held-out ones.

    The stream is the concatenation of epochs, each visiting every usable row once in its own order; a batch may cross
    from one epoch into the next. With `trainer.epochs` it ends after that many, otherwise it never does.
    """

    def __init__(self, cfg: Config, checked: Checked, encoder: Encoder):
        self._seed = cfg.run.seed
        self._shuffle = cfg.data.shuffle
        self._epochs = cfg.trainer.epochs
        self._limit = cfg.data.max_prompt_tokens
        self._encoder = encoder
        self._train = checked.train
        self._eval = checked.eval
        self._train_usable = checked.train_usable
        self._eval_usable = checked.eval_usable
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self._consumed = 0
        self.notes = checked.notes
        """Sentences for the console: what was left out, and why."""
        self.fingerprint = checked.train.fingerprint()
        """Hash of the training rows by content."""

    @property
    def train_rows(self) -> int:
        """Usable training rows."""
        return len(self._train_usable)

    @property
    def eval_rows(self) -> int:
        """Usable held-out rows."""
        return len(self._eval_usable)

    @property
    def total(self) -> int | None:
        """Prompts of the whole stream: rows x `trainer.epochs`; None when the steps are what is counted."""
        return None if self._epochs is None else self._epochs * self.train_rows

    @property
    def spent(self) -> bool:
        """Whether `next` has nothing more to give."""
        return self.total is not None and self._consumed >= self.total

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts; fewer, in the end none, only where the last epoch ends."""
        if self.total is not None:
            count = min(count, self.total - self._consumed)
        prompts = [self._prompt(self._train, self._at(self._consumed + i), "row") for i in range(count)]
        self._consumed += count
        return prompts

    def prompt(self, prompt_id: str) -> Prompt:
        """The prompt that `next` gave out under this id, read again from the data; the cursor stays where it is."""
        return self._prompt(self._train, int(prompt_id.removeprefix("row-")), "row")

    def eval_prompts(self, limit: int | None) -> list[Prompt]:
        """The first `limit` held-out prompts in the order of the data (None: all); empty where there are none."""
        return [self._prompt(self._eval, index, "eval") for index in self._eval_usable[:limit]] if self._eval else []

    def state(self) -> dict[str, Any]:
        """The cursor as plain JSON values."""
        return {"consumed": self._consumed, "rows": self.train_rows, "fingerprint": self.fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues at a saved cursor. ConfigError (`resume_matches_run`) when the rows are not those of the run."""
        for name, now in (("fingerprint", self.fingerprint), ("rows", self.train_rows)):
            if state[name] != now:
                what = {"fingerprint": "content (SHA-256)", "rows": "number of usable prompts"}[name]
                message = f"The {what} of data.train was {state[name]} in the checkpoint and is {now} now."
                fix = "Restore the data and data.* keys of the run, or trainer.resume=never in a new run."
                raise ConfigError(Finding("resume_matches_run", ("data.train", "trainer.resume"), message, fix))
        self._consumed = state["consumed"]

    def _at(self, position: int) -> int:
        """Row index at a position of the stream."""
        epoch, place = divmod(position, self.train_rows)
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch(epoch))
        return self._order[1][place]

    def _epoch(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return self._train_usable
        order = array("Q", self._train_usable)
        random.Random(derive_seed(self._seed, "data", epoch)).shuffle(order)  # type: ignore[arg-type]
        return order

    def _prompt(self, rows: Rows, index: int, prefix: str) -> Prompt:
        row = rows.row(index)
        text, ids = self._encoder.encode(row.prompt)
        if not 0 < len(ids) <= self._limit:  # was measured at load: only a template that looks at the clock gets here
            raise RunError(f"{row.source} has {len(ids)} tokens now, more than data.max_prompt_tokens={self._limit}.")
        return Prompt(f"{prefix}-{index}", text, ids, row.answer, row.columns, row.source)


def load_data(cfg: Config, tokenizer: Any) -> Data:
    """Reads and checks all rows of `cfg.data`, templated and tokenised by `tokenizer`; imports no torch.

    Raises ConfigError with every finding of the data (rules of the section Data), bad rows with file:line.
    """
    encoder = Encoder(tokenizer, cfg.data.system_prompt, cfg.data.chat_template)
    checked = check(cfg, encoder)
    errors = error_findings(checked.findings)
    if errors:
        raise ConfigError(errors)
    return Data(cfg, checked, encoder)


def inspect(cfg: Config, tokenizer: Any | None, visit: Callable[[Row], None] | None = None) -> list[Finding]:
    """All findings on the data, warnings too, without raising; without a tokenizer those that need none.

    `visit` is called with every readable row: one reading serves other checks too.
    """
    return inspect_rows(cfg, tokenizer, visit).findings


def inspect_rows(
    cfg: Config,
    tokenizer: Any | None,
    visit: Callable[[Row], None] | None = None,
    reads_answer: bool = False,
    command: str = "train",
) -> Checked:
    """The same, with the rows themselves where they can be read; see `check` for what else is told."""
    encoder = None
    findings: list[Finding] = []
    if tokenizer is not None:
        try:
            encoder = Encoder(tokenizer, cfg.data.system_prompt, cfg.data.chat_template)
        except ConfigError as error:
            findings = error.findings
    checked = check(cfg, encoder, visit, reads_answer, command)
    checked.findings = findings + checked.findings
    return checked
