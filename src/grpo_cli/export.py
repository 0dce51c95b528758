"""A Hugging Face model directory: of the policy at the end of a run, or of a checkpoint (`grpo export`)."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_cli.checkpoint import manifest
from grpo_cli.errors import EXIT_OK, ConfigError, Finding, RunError
from grpo_cli.files.jsonio import fsync_dir, write_failed, write_json
from grpo_cli.files.rundir import RunDir
from grpo_cli.process.signals import stop
from grpo_cli.schema import Config
from grpo_cli.terminal.parser import Parser

SHARD_BYTES = 2**30
"""Weights are written in files of about this size; one of them is held in memory at a time."""


def main(arguments: Sequence[str]) -> int:
    """`grpo export RUN_DIR [--step N] OUT`. Raises ConfigError for a wrong path or a checkpoint that is not whole."""
    parser = Parser("export", "Turns a checkpoint into a Hugging Face model directory.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, help="a new directory")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint's step; the newest whole one if not given"
    )
    asked = parser.read(arguments)
    directory = find(RunDir(asked.run_dir), asked.step)
    if asked.out.exists():
        raise ConfigError(Finding("export_is_new", ("OUT",), f"{asked.out} exists already.", "a path that is free"))
    export(directory, asked.out)
    print(f"{directory} -> {asked.out}")
    return EXIT_OK


def find(run_dir: RunDir, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest whole one; ConfigError with the reasons where it cannot be used."""
    candidates = dict(manifest.newest_first(run_dir.checkpoints))
    if step is not None:
        candidates = {number: path for number, path in candidates.items() if number == step}
    told = []
    for number, path in candidates.items():
        problems = manifest.problems(path)
        if not problems:
            return path
        told.append(f"step {number}: {'; '.join(problems[:3])}")
    what = f"checkpoint of step {step}" if step is not None else "checkpoint"
    message = f"{run_dir.checkpoints} holds no whole {what}{''.join(f'; {line}' for line in told)}."
    raise ConfigError(
        Finding("resume_checkpoint_complete", ("RUN_DIR", "--step"), message, "another RUN_DIR or --step")
    )


def export(directory: Path, out: Path) -> None:
    """The weights of a checkpoint as a model directory. The start model is read from where the run had it."""
    from grpo_cli.checkpoint import store as checkpoint
    from grpo_cli.model.network import add_lora, load_causal_lm
    from grpo_cli.model.tokenizer import load_tokenizer
    from grpo_cli.model.weights import full_parameters
    from grpo_cli.schema import parse

    cfg = parse(RunDir(directory).read_config())
    lm = load_causal_lm(cfg.model)
    if cfg.model.lora is not None:
        lm = add_lora(lm, cfg.model)
    checkpoint.read_weights(directory, lm)
    _write(lm, _tokenizer(load_tokenizer(cfg.model), cfg), full_parameters(lm), out)


def save_model(policy: Any, out: Path, ranks: Any) -> None:
    """The policy as a model directory, adapters merged; an older one of that name is replaced. Every rank calls it.

    Weights come a few at a time. Raises RunError, on every rank, where the disk is full.
    """
    failure = None
    parameters = policy.gathered_parameters()
    if ranks.first:
        try:
            _write(policy.module, _tokenizer(policy.tokenizer, policy.cfg), parameters, out)
        except RunError as error:
            failure = str(error)
    for _ in parameters:  # the other ranks, and the first one after a failure, take part in every gather
        stop.rank_file.alive()
    failure = ranks.gather(failure)[0]
    if failure:
        raise RunError(failure)


def _tokenizer(tokenizer: Any, cfg: Config) -> Any:
    """The tokenizer with the chat template that the policy was trained behind."""
    from grpo_cli.data.encode import read_template

    with suppress(ConfigError):  # the template's file has gone since the start: the weights are worth more
        tokenizer.chat_template = read_template(cfg.data.chat_template) or tokenizer.chat_template
    return tokenizer


def _write(lm: Any, tokenizer: Any, parameters: Iterable[tuple[str, Any]], out: Path) -> None:
    from grpo_cli.model.network import config_to_save
    from grpo_cli.model.weights import without_adapters

    plain = without_adapters(lm)
    aside = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        try:
            aside.mkdir(parents=True)
            _write_weights(parameters, aside)
            config_to_save(plain).save_pretrained(aside)
            if plain.generation_config is not None:
                plain.generation_config.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            for path in aside.iterdir():
                _fsync(path)
            if out.exists():
                os.rename(out, aside.with_name(f"{aside.name}.old"))
            os.rename(aside, out)
            fsync_dir(out.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(aside.with_name(f"{aside.name}.old"), ignore_errors=True)
    except OSError as error:
        raise write_failed(out, error) from error


def _write_weights(parameters: Iterable[tuple[str, Any]], directory: Path) -> None:
    from grpo_cli.checkpoint.tensorfile import TensorWriter

    files: list[tuple[str, list[str]]] = []
    total = 0
    for number, shard in enumerate(_shards(parameters), start=1):
        name = f"model-{number:05d}.safetensors"
        shapes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in shard.items()}
        writer = TensorWriter(directory / name, shapes, {"format": "pt"})
        for key, tensor in shard.items():
            writer.write(key, tensor)
        writer.close()
        files.append((name, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(files) == 1:
        os.rename(directory / files[0][0], directory / "model.safetensors")
        return
    index = {}
    for name, keys in files:  # transformers expects the number of files in each name
        final = re.sub(r"-(\d{5})\.", rf"-\1-of-{len(files):05d}.", name)
        os.rename(directory / name, directory / final)
        index.update(dict.fromkeys(keys, final))
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _shards(parameters: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Name -> tensor on the CPU, of at most about `SHARD_BYTES`. Copies: a tensor is gone when the next one comes."""
    shard: dict[str, Any] = {}
    size = 0
    for name, tensor in parameters:
        stop.rank_file.alive()
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.to("cpu", copy=True)
        size += tensor.nbytes
    if shard:
        yield shard


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
