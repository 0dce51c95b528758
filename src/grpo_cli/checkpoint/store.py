"""Saving and resuming a run: every rank writes its own slices, and the directory gets its name when all is durable.

No pickle anywhere: tensors are safetensors, everything else is JSON. Slices are by parameter and position
(zerostate.py), so a checkpoint resumes on any number of ranks at any ZeRO stage; on the same ones in float32 it goes
on bit by bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_cli.checkpoint import manifest, randomstate
from grpo_cli.checkpoint.manifest import CONFIG, STATE, directory_name
from grpo_cli.checkpoint.resume import AUTO, NEVER, run_findings
from grpo_cli.checkpoint.tensorfile import TensorWriter
from grpo_cli.checkpoint.zerostate import MOMENTS, WEIGHT, ZeroState
from grpo_cli.errors import ConfigError, Finding, RunError
from grpo_cli.files.jsonio import fsync_dir, read_json, write_failed, write_json, write_lines
from grpo_cli.files.rundir import RunDir
from grpo_cli.process.ranks import Ranks
from grpo_cli.process.signals import stop
from grpo_cli.schema import Config

LEDGER = "ledger.jsonl"
_ASIDE = ".aside_"


def due(cfg: Config, step: int, is_last: bool) -> bool:
    """Whether a checkpoint follows step `step`: every `trainer.save_every` steps, and after the last."""
    every = cfg.trainer.save_every
    return every is not None and (step % every == 0 or is_last)


# -- saving ----------------------------------------------------------------------------------------------


def save(cfg: Config, run_dir: RunDir, ranks: Ranks, policy: Any, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint after `state["step"]` steps; returns its directory. Every rank calls it.

    `state` is what the loop needs back, as JSON values, the same on every rank. Raises RunError on all ranks where
    one of them cannot write: then nothing of this checkpoint stays, and older ones are untouched.
    """
    final = run_dir.checkpoints / directory_name(state["step"])
    # A whole one of this step is of this run (`load` takes others out of sight): the same state, saved a moment ago.
    if ranks.gather(ranks.first and not manifest.quick_problems(final))[0]:
        return final
    aside = final.with_name(_ASIDE + final.name)
    _together(ranks, lambda: _make_aside(aside) if ranks.first else None)
    try:
        zero = ZeroState(policy)
        entries = _together(ranks, lambda: _write_rank(aside, ranks, zero))
        _together(ranks, lambda: _finish(cfg, run_dir, ranks, zero, state, aside, entries) if ranks.first else None)
    except RunError:
        if ranks.first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    if ranks.first:
        _rotate(run_dir.checkpoints, cfg.trainer.keep_checkpoints)
    return final


def _together(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """`work` on every rank, and a barrier: its results in rank order. A failure on one rank is raised on all."""
    try:
        result, failure = work(), None
    except (RunError, OSError) as error:
        told = error if isinstance(error, RunError) else write_failed(Path(error.filename or "?"), error)
        result, failure = None, str(told)
    outcomes = ranks.gather((result, failure))
    failures = [failure for _, failure in outcomes if failure]
    if failures:
        raise RunError(failures[0])
    return [result for result, _ in outcomes]


def _make_aside(aside: Path) -> None:
    aside.parent.mkdir(exist_ok=True)
    for left in aside.parent.glob(f"{_ASIDE}*"):  # of a save that was killed
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir()


def _write_rank(aside: Path, ranks: Ranks, zero: ZeroState) -> dict[str, Any]:
    """This rank's slices and random state; name -> size and SHA-256."""
    pieces = list(zero.owned())
    shapes = {
        f"{kind}/{piece.name}": (view.dtype, tuple(view.shape))
        for piece in pieces
        for kind, view in zero.tensors(piece).items()
    }
    starts = json.dumps({piece.name: piece.start for piece in pieces})
    slices = aside / f"slices_{ranks.rank:05d}.safetensors"
    writer = TensorWriter(slices, shapes, {"starts": starts})
    for piece in pieces:
        stop.rank_file.alive()
        for kind, view in zero.tensors(piece).items():
            writer.write(f"{kind}/{piece.name}", view)
    digest = writer.close()
    rng = aside / f"rng_{ranks.rank:05d}.json"
    write_json(rng, randomstate.capture())
    return {slices.name: {"size": writer.size, "sha256": digest}, **_entry(rng)}


def _entry(path: Path) -> dict[str, Any]:
    return {path.name: {"size": path.stat().st_size, "sha256": manifest.sha256(path)}}


def _finish(
    cfg: Config,
    run_dir: RunDir,
    ranks: Ranks,
    zero: ZeroState,
    state: Mapping[str, Any],
    aside: Path,
    entries: list[dict[str, Any]],
) -> None:
    """Rank 0: what is common to all, the manifest, and the name."""
    layout = {"world_size": ranks.world, "zero_stage": zero.stage}
    common = {
        "run": state,
        "layout": layout,
        "optimizer_steps": zero.steps,
        "parameters": zero.shapes(),
        "versions": run_dir.state().get("versions"),
    }
    write_json(aside / STATE, common)
    RunDir(aside).write_config(cfg.model_dump())
    ledger = run_dir.ledger_path.read_text().splitlines() if run_dir.ledger_path.exists() else []
    write_lines(aside / LEDGER, ledger)
    files = {name: entry for entry_of_rank in entries for name, entry in entry_of_rank.items()}
    for name in (STATE, CONFIG, LEDGER):
        files |= _entry(aside / name)
    digest = files[CONFIG]["sha256"]
    written = {"format": manifest.FORMAT, "step": state["step"], **layout, "config_sha256": digest, "files": files}
    write_json(aside / manifest.NAME, written)
    fsync_dir(aside)
    final = aside.with_name(aside.name.removeprefix(_ASIDE))
    if final.exists():  # a damaged one
        _remove(final)
    os.rename(aside, final)
    fsync_dir(final.parent)


def _remove(directory: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that half of one never looks like a whole one."""
    doomed = directory.with_name(f"{_ASIDE}{directory.name}.{secrets.token_hex(4)}")
    os.rename(directory, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _rotate(checkpoints: Path, keep: int | None) -> None:
    """Delete whole checkpoints beyond the `keep` newest, and unfinished ones that are older than all of those."""
    if keep is None:
        return
    whole = [step for step, path in manifest.newest_first(checkpoints) if not manifest.quick_problems(path)]
    oldest_kept = whole[: max(keep, 1)][-1] if whole else 0
    for step, path in list(manifest.newest_first(checkpoints)):
        if step < oldest_kept:
            with contextlib.suppress(OSError):
                _remove(path)


# -- resuming --------------------------------------------------------------------------------------------


def load(cfg: Config, run_dir: RunDir, ranks: Ranks, policy: Any, data: Any = None) -> dict[str, Any] | None:
    """Go on from the checkpoint that `trainer.resume` means: weights, moments, random states, files of the run
    directory.

    Returns what the loop gave to `save`; None for a fresh start. Every rank calls it. Says on the console what it
    took and what it passed over. Raises ConfigError where the named checkpoint is not whole or does not belong to
    this run.
    """
    say = _speaker(cfg, ranks)
    directory = _choose(cfg, run_dir, ranks, say)
    if directory is None:
        _together(ranks, lambda: _forget_later(run_dir, -1, -1) if ranks.first else None)
        randomstate.reseed(cfg.run.seed, 0, ranks.rank)
        return None
    _refuse_another_run(cfg, directory)
    common = read_json(directory / STATE)
    layout = common["layout"]
    if data is not None and "source" in common["run"]:
        data.load_state(common["run"]["source"]["data"])
    _read_slices(directory, ZeroState(policy), common)
    step = common["run"]["step"]
    rng = directory / f"rng_{ranks.rank:05d}.json"
    if layout["world_size"] == ranks.world:
        randomstate.restore(read_json(rng))
    else:
        randomstate.reseed(cfg.run.seed, step, ranks.rank)
        say(f"The checkpoint is of {layout['world_size']} ranks, this run has {ranks.world}: random states are new.")
    _together(ranks, lambda: _restore_files(run_dir, directory, step) if ranks.first else None)
    say(f"Resumed after step {step} from {directory}.")
    return common["run"]


def _speaker(cfg: Config, ranks: Ranks) -> Callable[[str], None]:
    def say(text: str) -> None:
        if ranks.first and cfg.logger.console != "off":
            with contextlib.suppress(OSError):
                print(text, flush=True)

    return say


def _choose(cfg: Config, run_dir: RunDir, ranks: Ranks, say: Callable[[str], None]) -> Path | None:
    """The directory to load, the same on every rank, its hashes checked by all of them together."""
    wanted = cfg.trainer.resume
    if wanted == NEVER:
        return None
    if wanted != AUTO:
        directory = Path(wanted).expanduser().absolute()
        problems = _problems(directory, ranks)
        if problems:
            message = f"trainer.resume={directory} cannot be used: {'; '.join(problems[:5])}."
            raise ConfigError(
                Finding("resume_checkpoint_complete", ("trainer.resume",), message, "trainer.resume=auto")
            )
        return directory
    candidates = [path for _, path in manifest.newest_first(run_dir.checkpoints)]
    for directory in ranks.gather(candidates)[0]:
        problems = _problems(directory, ranks)
        if not problems:
            return directory
        say(f"Passed over {directory}: {'; '.join(problems[:3])}.")
    say(
        f"A fresh start: no whole checkpoint in {run_dir.checkpoints} (an earlier run goes on in its own directory: "
        "run.dir=DIR)."
    )
    return None


def _problems(directory: Path, ranks: Ranks) -> list[str]:
    quick = ranks.gather(manifest.quick_problems(directory))[0]
    if quick:
        return quick
    found = ranks.gather(manifest.hash_problems(directory, ranks.rank, ranks.world))
    return [problem for share in found for problem in share] or ranks.gather(manifest.not_plain(directory))[0]


def _refuse_another_run(cfg: Config, directory: Path) -> None:
    """The rules that the parent asked of the newest checkpoint, of the one that is taken: it may be an older one."""
    errors = [finding for finding in run_findings(cfg, directory) if finding.severity == "error"]
    if errors:
        raise ConfigError(errors)


def _restore_files(run_dir: RunDir, directory: Path, step: int) -> None:
    """Rank 0: the run directory as it was after `step`."""
    # Another run's checkpoint: what stands here up to its step is another history.
    foreign = directory.parent.resolve() != run_dir.checkpoints.resolve()
    # Step 0 has a row only where it was evaluated, and a run that resumes there evaluates again.
    _forget_later(run_dir, -1 if foreign or step == 0 else step, step - 1 if foreign else step)
    if (directory / LEDGER).exists():
        write_lines(run_dir.ledger_path, (directory / LEDGER).read_text().splitlines())
    if run_dir.state():
        run_dir.update(status="running", step=step)


def _forget_later(run_dir: RunDir, row: int, step: int) -> None:
    """Cut metrics, ledger and rollouts after `row`, and take checkpoints after `step`, whole or not, out of sight."""
    run_dir.rewind(row)
    for later, path in list(manifest.newest_first(run_dir.checkpoints)):
        if later > step:
            os.rename(path, path.with_name(f"superseded_{path.name}_{secrets.token_hex(4)}"))


class _Slices:
    """The slices of a checkpoint, found by parameter and position. Files are mapped, not read whole.

    Only files that the manifest names are opened: their sizes and hashes were checked.
    """

    def __init__(self, directory: Path, opened: ExitStack):
        from safetensors import safe_open

        self._pieces: dict[str, list[tuple[int, int, Any]]] = {}
        written = manifest.read(directory)
        assert written is not None, "manifest.quick_problems comes first"
        for file_name in sorted(written["files"]):
            if not re.fullmatch(r"slices_\d{5}\.safetensors", file_name):
                continue
            file = opened.enter_context(safe_open(directory / file_name, framework="pt"))
            for name, start in json.loads(file.metadata()["starts"]).items():
                length = file.get_slice(f"{WEIGHT}/{name}").get_shape()[0]
                self._pieces.setdefault(name, []).append((start, length, file))

    def read(self, kind: str, name: str, start: int, into: Tensor) -> None:
        """Fill `into` [n] with the elements from `start` of the flattened parameter. Raises RunError where some are
        missing."""
        end, filled = start + into.numel(), 0
        for first, length, file in self._pieces.get(name, []):
            low, high = max(start, first), min(end, first + length)
            if low < high:
                into[low - start : high - start].copy_(file.get_slice(f"{kind}/{name}")[low - first : high - first])
                filled += high - low
        if filled != into.numel():
            raise RunError(f"The checkpoint lacks a part of {name} ({kind}): {filled} of {into.numel()} found.")


def _read_slices(directory: Path, zero: ZeroState, common: Mapping[str, Any]) -> None:
    saved = {name: tuple(shape) for name, shape in common["parameters"].items()}
    if saved != zero.shapes():
        differing = sorted(set(saved.items()) ^ set(zero.shapes().items()))[:3]
        raise ConfigError(
            Finding(
                "resume_matches_run",
                ("model.path", "model.lora", "trainer.resume"),
                f"{directory} holds other parameters than the model, for example {', '.join(n for n, _ in differing)}.",
                "Restore model.*, or trainer.resume=never with a new run.dir.",
            )
        )
    steps = common["optimizer_steps"]
    zero.allocate(steps)
    with ExitStack() as opened, torch.no_grad():
        slices = _Slices(directory, opened)
        for piece in zero.held():
            views = zero.tensors(piece)
            assert len(views) == (1 + len(MOMENTS) if steps else 1), piece.name
            for kind, view in views.items():
                slices.read(kind, piece.name, piece.start, view)
    zero.publish()


def read_weights(directory: Path, lm: torch.nn.Module) -> None:
    """Put the trained weights of a checkpoint into a model on the CPU, rounded to its type; `problems` come first."""
    shapes = read_json(directory / STATE)["parameters"]
    parameters = dict(lm.named_parameters())
    with ExitStack() as opened, torch.no_grad():
        slices = _Slices(directory, opened)
        for name, shape in shapes.items():
            whole = torch.empty(tuple(shape))
            slices.read(WEIGHT, name, 0, whole.view(-1))
            parameters[name].copy_(whole)
