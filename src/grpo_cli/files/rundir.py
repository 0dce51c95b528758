"""The run directory: who owns it, what state the run is in, and the files that grow with every step.

    RUN_DIR/config.yaml  run.json  metrics.jsonl  ledger.jsonl  rollouts/step_000012.jsonl  checkpoints/  model/

`run.json` holds `status`, `reason`, `step`, `steps`, `exit_code`, `pid`, `host`, `started`, `updated`, `ended`,
`versions`, `seeds`, `wandb` and `previous` (the earlier attempts in this directory). Status is one of `STATUSES`. One
process writes it at a time: the parent before the workers start and after they have gone, rank 0 in between.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_cli import __version__
from grpo_cli.errors import ConfigError, Finding, RunError
from grpo_cli.files.groupjson import to_dump
from grpo_cli.files.jsonio import append_line, dumps, read_json, read_rows, write_failed, write_json, write_lines
from grpo_cli.files.redact import check_no_secrets, redact
from grpo_cli.types import Group

STATUSES = ("starting", "running", "done", "failed", "refused", "guard", "stopped", "lost")
"""done: exit 0; failed: 1; refused: 2; guard: 3; stopped: 128 + N. The first two mean: not ended yet; with no live
owner (`RunDir.owner`) the run was killed, and the next attempt writes it down as lost."""

_LOCK_TRIES = 10

_ATTEMPT_KEYS = ("status", "reason", "step", "exit_code", "started", "ended")


def status_of(exit_code: int) -> str:
    """The final status that belongs to an exit code."""
    return {0: "done", 1: "failed", 2: "refused", 3: "guard"}.get(exit_code, "stopped" if exit_code > 128 else "failed")


def now() -> str:
    """Wall-clock time in UTC, for people: nothing is ever ordered by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunDir:
    """Paths and files of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser().absolute()
        self._lock_fd: int | None = None

    @classmethod
    def create(cls, path: str | Path) -> RunDir:
        """Make the directory, readable by its owner only; an existing one keeps its mode. Raises ConfigError."""
        run_dir = cls(path)
        try:
            run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = run_dir.path / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                Finding(
                    "run_dir_writable",
                    ("run.dir",),
                    f"run.dir={run_dir.path} cannot be created and written: {error.strerror or error}.",
                    "run.dir=DIR with a directory that you can write.",
                )
            ) from error
        return run_dir

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def state_path(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    # -- one live owner ---------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Own the directory until this process ends or `unlock`; ConfigError where a live process does already."""
        fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._flock_soon(fd)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks: there is nothing to hold
            owner = self.owner() or {}
            raise ConfigError(
                Finding(
                    "run_dir_is_fresh",
                    ("run.dir", "trainer.resume"),
                    f"run.dir={self.path} belongs to a run that is alive"
                    f" (process {owner.get('pid', '?')} on {owner.get('host', '?')}).",
                    "Another run.name or run.dir, or wait until that run has ended.",
                )
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self._lock_fd = fd

    @staticmethod
    def _flock_soon(fd: int) -> None:
        """Lock; for a moment, one that only asks who owns the directory (`owner`) may hold it."""
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.05)
        return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def owner(self) -> dict[str, Any] | None:
        """`pid` and `host` of the live process that owns the directory; None where nobody does."""
        try:
            fd = os.open(self.path / ".lock", os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            try:
                return json.loads(os.pread(fd, 4096, 0) or b"{}")
            except ValueError:
                return {}
        finally:
            os.close(fd)
        return None

    # -- config and state -------------------------------------------------------------------------------------------

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved config; ConfigError where a value holds a secret of the environment."""
        import yaml
        from omegaconf._utils import get_omega_conf_dumper

        check_no_secrets(config)
        # OmegaConf's dumper and loader, but not its containers: resolved text may hold `${`, which they would parse.
        text = yaml.dump(
            dict(config), default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=get_omega_conf_dumper()
        )
        write_lines(self.config_path, [text.rstrip("\n")])

    def read_config(self) -> dict[str, Any]:
        """The resolved config as a plain dict, numbers as OmegaConf reads them (plain YAML takes 1e-6 for text)."""
        import yaml
        from omegaconf._utils import get_yaml_loader

        try:
            with open(self.config_path, encoding="utf-8") as file:
                config = yaml.load(file, Loader=get_yaml_loader())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunError(f"{self.config_path} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise RunError(f"{self.config_path} holds no config.")
        return config

    def state(self) -> dict[str, Any]:
        """What run.json says; empty where there is none."""
        state = read_json(self.state_path)
        return state if isinstance(state, dict) else {}

    def attempt(self) -> tuple[str, ...]:
        """What tells this attempt from all others: directory, and host, process and start of its first parent."""
        state = self.state()
        return (str(self.path), *(str(state.get(key)) for key in ("host", "pid", "started")))

    def require_shared(self, gather: Callable[[tuple[str, ...]], list[tuple[str, ...]]]) -> None:
        """All nodes must see this one directory; `gather` collects from all ranks. Raises ConfigError on all of them.

        Each rank writes its part of a checkpoint there, and one of them the results.
        """
        seen = gather(self.attempt())
        if any(other != seen[0] for other in seen):
            where = "; ".join(dict.fromkeys(f"{path} of {host}" for path, host, *_ in seen))
            message = f"The nodes of this run have run directories of their own ({where})."
            fix = "run.dir=DIR with one directory that all nodes see, the same on each"
            raise ConfigError(Finding("nodes_share_the_run_dir", ("run.dir", "trainer.nnodes"), message, fix))

    def begin(self, *, seed: int, steps: int | None) -> None:
        """Start an attempt: status `starting`; an earlier one is kept under `previous`."""
        old = self.state()
        previous = old.get("previous", [])
        if old:
            attempt = {key: old.get(key) for key in _ATTEMPT_KEYS}
            if attempt["status"] in ("starting", "running"):
                attempt.update(status="lost", reason="It ended without a word: killed, or the machine went down.")
            previous = [*previous, attempt]
        write_json(
            self.state_path,
            {
                "status": "starting",
                "reason": None,
                "step": 0,
                "steps": steps,
                "exit_code": None,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "started": now(),
                "updated": now(),
                "ended": None,
                "versions": _versions(),
                "seeds": {"run": seed},
                "wandb": old.get("wandb"),
                "previous": previous,
            },
        )

    def update(self, **fields: Any) -> None:
        """Change fields of run.json, atomically. Text is redacted."""
        state = {**self.state(), **fields, "updated": now()}
        assert state.get("status") in STATUSES, state.get("status")
        if state.get("reason"):
            state["reason"] = redact(state["reason"])
        write_json(self.state_path, state)

    def end(self, exit_code: int, reason: str | None) -> None:
        """The last word on an attempt."""
        self.update(status=status_of(exit_code), reason=reason, exit_code=exit_code, ended=now())

    # -- files that grow --------------------------------------------------------------------------------------------

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One strict JSON line of metrics.jsonl, durable when this returns. RunError where the disk is full."""
        append_line(self.metrics_path, dumps(dict(row)))

    def append_ledger(self, row: Mapping[str, Any]) -> None:
        """One line of ledger.jsonl: the fates that one step decided (see ledger.py)."""
        append_line(self.ledger_path, dumps(dict(row)))

    def dump_rollouts(self, step: int, groups: Iterable[Group]) -> None:
        """Write all groups of a step, kept and dropped, to rollouts/step_N.jsonl, whole or not at all."""
        try:
            self.rollouts.mkdir(exist_ok=True)
        except OSError as error:
            raise write_failed(self.rollouts, error) from error
        write_lines(self.rollout_path(step), (dumps(to_dump(group, step)) for group in groups))

    def rollout_path(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.jsonl"

    def rollout_files(self) -> Iterator[tuple[int, Path]]:
        """(step, path) of every rollout dump, in the order of steps."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.rollouts.iterdir():
                match = re.fullmatch(r"step_(\d{6,})\.jsonl", path.name)
                if match:
                    found.append((int(match[1]), path))
        yield from sorted(found)

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: a resumed run writes those steps again, so every step stands there once."""
        for path in (self.metrics_path, self.ledger_path):
            if path.exists():
                write_lines(path, [dumps(row) for row in read_rows(path) if row.get("step", 0) <= step])
        for dumped, path in self.rollout_files():
            if dumped > step:
                path.unlink()


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version

    versions = {"grpo": __version__, "python": python_version()}
    for name in ("torch", "deepspeed", "transformers", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
