"""What every command shares on the terminal: one-line usage errors, findings on stderr, help made when asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from grpo_cli.errors import EXIT_USAGE, Finding
from grpo_cli.options import nearest
from grpo_cli.terminal.output import say


class Parser(argparse.ArgumentParser):
    """argparse with one line an error, no abbreviations, overrides anywhere, and an epilog made when asked for."""

    def __init__(self, command: str, description: str, epilog: Callable[[], str] | None = None):
        super().__init__(
            prog=f"grpo {command}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._make_epilog = epilog

    def format_help(self) -> str:
        if self._make_epilog is not None:
            self.epilog = self._make_epilog()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message} (see {self.prog} --help)\n")

    def add_overrides(self) -> None:
        """The positional overrides and `--config-dir`."""
        self.add_argument(
            "--config-dir", type=Path, metavar="DIR", help="your own groups and options, beside the shipped"
        )
        self.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="GROUP=OPTION or KEY=VALUE")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The parsed command line; options and overrides may stand in any order."""
        space, unknown = self.parse_known_intermixed_args(arguments)
        for word in unknown:
            known = [option for action in self._actions for option in action.option_strings]
            meant = word.lstrip("-") if "=" in word else nearest(word, known)
            self.error(f"unknown option {word}; did you mean {meant}?")
        return space


def one_line(text: str) -> str:
    """Text on one line; characters that would move the cursor or change colours are written as escapes.

    >>> one_line("a\\nb\\x1b[2J")
    'a b\\\\x1b[2J'
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text.replace("\n", " ")
    )


def show(findings: Iterable[Finding]) -> None:
    """One line a finding on stderr, errors and warnings in their order; nobody needs to read them."""
    for finding in findings:
        say(one_line(finding.line()))
