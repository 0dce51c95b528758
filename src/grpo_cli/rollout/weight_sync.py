"""The ways by which new weights reach a vLLM server: files that it reads, NCCL, or memory that it opens (CUDA IPC)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from grpo_cli.errors import RunError
from grpo_cli.rollout.server_process import HOST, free_port
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


class TransferSender:
    """vLLM's own weight transfer: `nccl` between devices, `ipc` on the same ones."""

    def __init__(self, how: str, policy: Any, ranks: Ranks, client: Client):
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        self._ranks, self._client = ranks, client
        self._engine = WeightTransferTrainerFactory.trainer_init(
            _init_info(how, ranks, client), client=_control(client), source=_source(policy)
        )

    def send(self, policy: Any, version: int) -> None:
        error = None
        try:
            self._engine.send_weights()
            if self._ranks.first:
                self._client.wait(self._client.call("grpo_finish_load"))
        except RunError as failure:
            error = str(failure)
        together(self._ranks, error)

    def close(self) -> None:
        self._engine.shutdown()


def _init_info(how: str, ranks: Ranks, client: Client) -> Any:
    if how == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=ranks.rank, packed=True)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    workers = sum(_world_sizes(client)) if ranks.first else 0
    return NCCLTrainerInitInfo(HOST, free_port(), world_size=1 + workers, rank=ranks.rank)


def _world_sizes(client: Client) -> list[int]:
    return [answer["world_size"] for answer in client.wait(client.everywhere("GET", "/get_world_size"))]


def _control(client: Client) -> Any:
    """What vLLM's trainer side asks of the servers, through our client: with the key, and to all of them."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    class Control(HTTPVLLMWeightSyncClient):
        def __init__(self) -> None:
            super().__init__(base_url="")

        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            client.wait(client.everywhere("POST", f"/{path}", json=json))

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            client.wait(client.each("/init_weight_transfer_engine", self._infos(init_info)))

        def _infos(self, init_info: dict[str, Any]) -> list[dict[str, Any]]:
            """One for each server: its workers come after those of the servers before it."""
            if "rank_offset" not in init_info:
                return [{"init_info": init_info}] * len(client.urls)
            infos, offset = [], init_info["rank_offset"]
            for size in _world_sizes(client):
                infos.append({"init_info": {**init_info, "rank_offset": offset}})
                offset += size
            return infos

    return Control()


def _source(policy: Any) -> Any:
    """The policy's weights in the form that vLLM's trainer side reads, gathered a few at a time on all ranks."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class PolicySource(WeightSource):
        def __init__(self) -> None:
            self._metadata: list[ParamMeta] = []

        def metadata(self) -> list[ParamMeta]:
            if not self._metadata:
                weights = policy.gathered_parameters()
                self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]
            return self._metadata

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return named_copies(policy)

    return PolicySource()


def together(ranks: Ranks, error: str | None) -> None:
    """Raise RunError on every rank where one of them has an `error`."""
    found = next((told for told in ranks.gather(error) if told), None)
    if found:
        raise RunError(found)
