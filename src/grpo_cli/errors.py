"""What can go wrong, said so that the reader knows what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_GUARD = 3


def signal_exit_code(signum: int) -> int:
    """Exit code of a run that stopped, after saving, because of signal `signum`."""
    return 128 + signum


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: a broken rule, the keys that break it and the overrides that mend it.

    >>> Finding("run_length_given", ("trainer.steps", "trainer.epochs"), "Both are null.", "trainer.steps=100")
    """

    rule: str
    keys: tuple[str, ...]
    message: str
    fix: str
    severity: Literal["error", "warning"] = "error"

    def as_json(self) -> dict:
        """The form that `--json` prints: rule, keys, message, fix."""
        finding = asdict(self)
        finding["keys"] = list(self.keys)
        del finding["severity"]
        return finding

    def line(self) -> str:
        """The one line a person reads."""
        return f"{self.severity}: {self.message} [{self.rule}] Fix: {self.fix}"


class ConfigError(ValueError):
    """Something the user can get wrong, with key, value and fix. Exit code 2: nothing was loaded."""

    def __init__(self, findings: Finding | Sequence[Finding]):
        self.findings = [findings] if isinstance(findings, Finding) else list(findings)
        super().__init__("\n".join(finding.line() for finding in self.findings))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks; an exception is remade from its message, which is not what this one takes.
        return type(self), (self.findings,)


class RunError(RuntimeError):
    """The run failed while running, for a reason that one line can tell. Exit code 1."""


class GuardStop(RuntimeError):
    """A guard ended the run: nothing to train on, non-finite steps, a failed sync check. Exit code 3."""


class SignalStop(RuntimeError):
    """The run was told to stop and has saved. Exit code 128 + `signum`."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(f"stopped by signal {signum}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signum,)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a run that `error` ended."""
    if isinstance(error, SignalStop):
        return signal_exit_code(error.signum)
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_GUARD if isinstance(error, GuardStop) else EXIT_FAILED
