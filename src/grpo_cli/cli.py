"""The command `grpo`: hands over to one module a command, and turns what it raises into an exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from grpo_cli import __version__
from grpo_cli.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    GuardStop,
    RunError,
    SignalStop,
    exit_code_of,
    signal_exit_code,
)
from grpo_cli.options import nearest
from grpo_cli.terminal.output import LOST, open_missing, say, silence
from grpo_cli.terminal.parser import one_line, show

COMMANDS = {
    "train": "grpo_cli.train",
    "validate": "grpo_cli.validate",
    "plan": "grpo_cli.plan",
    "replay": "grpo_cli.replay",
    "eval": "grpo_cli.evaluate",
    "report": "grpo_cli.report",
    "doctor": "grpo_cli.doctor",
    "export": "grpo_cli.export",
    "status": "grpo_cli.status",
    "completion": "grpo_cli.terminal.completion",
}
"""Command -> the module whose `main(arguments) -> exit code` does it; imported only when asked for."""

_SIGINT, _SIGPIPE = 2, 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit codes are those of errors.py. What a user can get wrong never shows a traceback."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # text that the terminal cannot show is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        show(error.findings)
        return EXIT_USAGE
    except (RunError, GuardStop, SignalStop) as error:
        return _say(error, exit_code_of(error))
    except KeyboardInterrupt:
        return signal_exit_code(_SIGINT)
    except OSError as error:
        if error.filename is not None or error.errno not in LOST:
            raise
        silence(1)
        if isinstance(error, BrokenPipeError):  # the reader has gone, for example `| head`
            return signal_exit_code(_SIGPIPE)
        return _say(f"standard output cannot be written: {error.strerror}", EXIT_FAILED)


def _dispatch(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in COMMANDS:
        return importlib.import_module(COMMANDS[command]).main(rest)
    if command in ("-V", "--version"):
        print(f"grpo {__version__}")
        return EXIT_OK
    if command in ("", "-h", "--help", "help"):
        from grpo_cli.terminal.usage import overview

        print(overview(), file=sys.stdout if command else sys.stderr)
        return EXIT_OK if command else EXIT_USAGE
    meant = "train " + command if "=" in command else nearest(command, COMMANDS)
    return _say(f"unknown command {command}; did you mean grpo {meant}? (see grpo --help)", EXIT_USAGE)


def _say(reason: object, code: int) -> int:
    say(f"error: {one_line(str(reason))}")
    return code


if __name__ == "__main__":
    sys.exit(main())
