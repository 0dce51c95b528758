"""One row a step, to metrics.jsonl, to W&B and to the person who watches."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from grpo_cli.errors import RunError
from grpo_cli.files.rundir import RunDir
from grpo_cli.schema import Config
from grpo_cli.terminal.console import Console, Silent, make_console

Metrics = Mapping[str, float | int | None]


class Logger:
    """Writes the rows of a run; on every rank but the main one it does nothing.

    `start_step` is the last step that is already done, `steps` the last one of the run (None: not known yet),
    `wandb_id` the id that a checkpoint carries (used where run.json has none).
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: RunDir,
        is_main: bool = True,
        *,
        start_step: int = 0,
        steps: int | None = None,
        wandb_id: str | None = None,
    ):
        self._run_dir = run_dir
        self._is_main = is_main
        self._last_step = start_step
        self._at = time.monotonic()
        self._wandb: _Wandb | None = None
        self._console: Console = Silent()
        if is_main:
            if cfg.logger.wandb.mode != "disabled":
                self._wandb = _Wandb(cfg, run_dir, wandb_id)
            self._console = make_console(cfg.logger.console, cfg.run.name, steps, start_step)

    @property
    def wandb_id(self) -> str | None:
        """Id of the W&B run, for the checkpoint; None without W&B."""
        return self._wandb.run_id if self._wandb else None

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the row of `step`: everything that was measured in it, evaluation included.

        Steps rise: there is one row a step on one counter. NaN and infinity are written as null, None values too; a
        quantity that was not computed is no key at all. Raises RunError where metrics.jsonl cannot be written.
        """
        assert step > self._last_step, f"step {step} after {self._last_step}: one row a step"
        self._last_step = step
        if not self._is_main:
            return
        now = time.monotonic()
        row = {"step": step, **metrics}
        if step > 0:  # step 0 is the evaluation before training
            row["time/step"] = now - self._at
        self._at = now
        self._run_dir.append_metrics(row)
        self._run_dir.update(status="running", step=step)
        if self._wandb:
            warning = self._wandb.log(step, row)
            if warning:
                self._console.note(warning)
        self._console.step(step, row)

    def note(self, text: str) -> None:
        """Say one line to the person: a resumed step, a checkpoint, a warning."""
        self._console.note(text)

    def close(self, exit_code: int) -> None:
        """End the display, and the W&B run with the exit code of the run: a failed run is not shown as finished."""
        self._console.close()
        if self._wandb:
            self._wandb.finish(exit_code)
            self._wandb = None


class _Wandb:
    """The W&B run of this run directory. A fault of W&B while training costs one warning, never the run."""

    def __init__(self, cfg: Config, run_dir: RunDir, wandb_id: str | None):
        import wandb

        known = run_dir.state().get("wandb") or {}
        self.run_id: str = known.get("id") or wandb_id or secrets.token_hex(4)
        self._run_dir = run_dir
        self._broken = False
        settings = cfg.logger.wandb
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                group=settings.group,
                tags=settings.tags,
                mode=settings.mode,
                name=cfg.run.name,
                id=self.run_id,
                resume="allow",
                dir=str(run_dir.path),
                config=cfg.model_dump(),
            )
        except Exception as error:  # whatever W&B raises: the person reads one line and what to change
            raise RunError(
                f"W&B did not start: {error}. logger.wandb.mode=offline trains without a connection."
            ) from error
        # Steps that the W&B run has seen are not sent again: it would drop them, and they are the same numbers.
        server_step = getattr(self._run, "step", 0)
        # -1: nothing was sent, for step 0 is the evaluation before training.
        self._sent = max(known.get("last_step", -1), (server_step if isinstance(server_step, int) else 0) - 1)
        self._remember()

    def _remember(self) -> None:
        self._run_dir.update(wandb={"id": self.run_id, "last_step": self._sent})

    def log(self, step: int, metrics: Metrics) -> str | None:
        if self._broken or step <= self._sent:
            return None
        try:
            self._run.log({k: v for k, v in metrics.items() if v is not None and k != "step"}, step=step)
        except Exception as error:
            self._broken = True
            return f"warning: W&B failed and is not used any more: {error}. metrics.jsonl has every row."
        self._sent = step
        self._remember()
        return None

    def finish(self, exit_code: int) -> None:
        if not self._broken:
            self._run.finish(exit_code=exit_code)
