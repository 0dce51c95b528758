"""The run directory, what is in it, and room for what will be."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from pathlib import Path

from grpo_cli.checks.start.report import Report
from grpo_cli.memory import read_shape
from grpo_cli.schema import Config

BYTES = {"bfloat16": 2, "float32": 4}
OPTIMIZER_BYTES = 12
"""Bytes a trained parameter: two moments of Adam and the master weight, in float32."""


def check(cfg: Config, report: Report) -> None:
    """The rules on the run directory and the logger's package."""
    path = Path(cfg.run.dir).expanduser()
    _check_writable(path, report)
    _check_room(cfg, path, report)
    if cfg.logger.wandb.mode != "disabled" and importlib.util.find_spec("wandb") is None:
        report.add(
            "wandb_installed",
            f"logger.wandb.mode={cfg.logger.wandb.mode} needs the package wandb, which cannot be found.",
            {"logger.wandb.mode": "disabled"},
            "pip install wandb",
        )


def _check_writable(path: Path, report: Report) -> None:
    made: list[Path] = []
    try:
        for folder in reversed([path, *path.parents]):
            if not folder.exists():
                folder.mkdir(mode=0o700)
                made.append(folder)
        probe = path / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        report.add("run_dir_writable", f"run.dir={path} cannot be created and written: {reason}.", "run.dir=DIR")
    finally:
        for folder in reversed(made):  # what the run needs, the run makes
            with contextlib.suppress(OSError):
                folder.rmdir()


def _check_room(cfg: Config, path: Path, report: Report) -> None:
    kept = cfg.trainer.keep_checkpoints
    size = checkpoint_bytes(cfg)
    if kept is None or size is None:
        return
    there = next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    free = shutil.disk_usage(there).free if there else None
    if free is not None and free < (kept + 1) * size:
        fits = free // size - 1
        report.add(
            "run_dir_has_room",
            f"run.dir={path} has {free / 1e9:.1f} GB free; trainer.keep_checkpoints={kept} and one being written need "
            f"{(kept + 1) * size / 1e9:.1f} GB ({size / 1e9:.1f} GB each).",
            *([{"trainer.keep_checkpoints": fits}] if fits >= 1 else []),
            "run.dir=DIR on a disk with room",
        )


def checkpoint_bytes(cfg: Config) -> int | None:
    """Bytes of one checkpoint: weights, and optimizer state of what is trained; None for an unknown architecture."""
    try:
        shape = read_shape(cfg.model.path, cfg.model.revision)
    except ValueError:
        return None
    lora = cfg.model.lora
    trained = shape.adapter_parameters(lora.rank, lora.target_modules) if lora else shape.parameters
    return shape.parameters * BYTES[cfg.model.dtype] + trained * OPTIMIZER_BYTES
