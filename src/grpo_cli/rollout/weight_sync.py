"""How new weights reach a vLLM server: through files that it reads, or by vLLM's own transfer (`weight_transfer`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from grpo_cli.errors import RunError
from grpo_cli.rollout.vllm import named_copies

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks
    from grpo_cli.rollout.server_client import Client

_SHARD_BYTES = 2**30
"""Of weights on their way to a file: what sending takes in memory besides the model."""


class Sender(Protocol):
    """One way of sending."""

    def send(self, policy: Any, version: int) -> None:
        """The policy's weights to every engine; all ranks call it. Raises RunError on all of them where it fails."""

    def close(self) -> None:
        """Let go of connections."""


def make_sender(how: str, policy: Any, ranks: Ranks, client: Client, directory: Path) -> Sender:
    """The sender of `rollout.weight_sync` = `how`."""
    if how == "disk":
        return DiskSender(ranks, client, directory)
    from grpo_cli.rollout.weight_transfer import TransferSender

    return TransferSender(how, policy, ranks, client)


class DiskSender:
    """Safetensors files, written aside, renamed when complete, read by the server and deleted."""

    def __init__(self, ranks: Ranks, client: Client, directory: Path):
        self._ranks, self._client, self._directory = ranks, client, directory

    def send(self, policy: Any, version: int) -> None:
        final = self._directory / f"weights_{version:06d}"
        aside = self._directory / f".weights_{version:06d}.incomplete"
        error = self._write(policy, aside, final)
        if error is None and self._ranks.first:
            try:
                self._client.wait(self._client.call("grpo_load", path=str(final)))
            except RunError as failure:
                error = str(failure)
        if self._ranks.first:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
        together(self._ranks, error)

    def _write(self, policy: Any, aside: Path, final: Path) -> str | None:
        """Write on rank 0; the other ranks take part in gathering. Returns what went wrong."""
        weights = named_copies(policy)
        error = None
        if self._ranks.first:
            try:
                shutil.rmtree(aside, ignore_errors=True)
                shutil.rmtree(final, ignore_errors=True)
                aside.mkdir(parents=True)
                write_shards(weights, aside)
                aside.rename(final)
            except Exception as failure:  # safetensors raises an error of its own for a full disk
                error = f"The weights cannot be written to {self._directory}: {failure}. Make room, or change run.dir."
        for _ in weights:  # what rank 0 left unread after an error is still gathered by all ranks together
            pass
        return error

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def write_shards(weights: Iterator[tuple[str, Tensor]], directory: Path, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write all weights as safetensors files of about `shard_bytes`, holding one file's weights at a time."""
    from safetensors.torch import save_file

    shard: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            save_file(shard, directory / f"model-{number:05d}.safetensors")
            shard, size, number = {}, 0, number + 1
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    save_file(shard, directory / f"model-{number:05d}.safetensors")


def together(ranks: Ranks, error: str | None) -> None:
    """Raise RunError on every rank where one of them has an `error`."""
    found = next((told for told in ranks.gather(error) if told), None)
    if found:
        raise RunError(found)
