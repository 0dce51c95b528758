"""vLLM's own weight transfer to its servers: `nccl` between devices, `ipc` (CUDA memory handles) on the same ones.

vLLM's trainer side runs on every rank, and takes for granted that the servers do their part. Here a server that dies or
refuses ends the transfer instead of leaving ranks waiting in it.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from grpo_cli.errors import RunError
from grpo_cli.process.network import address_towards
from grpo_cli.rollout.server_process import free_port
from grpo_cli.rollout.vllm import named_copies
from grpo_cli.rollout.weight_sync import together

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks
    from grpo_cli.rollout.server_client import Client

_CLOSE_TIMEOUT_S = 10.0


class TransferSender:
    """A `Sender` that vLLM's trainer side does the work of."""

    def __init__(self, how: str, policy: Any, ranks: Ranks, client: Client):
        self._ranks, self._client = ranks, client
        self._engine: Any = None
        self._control = control_of(client, self._give_up)
        source = source_of(policy)
        # The buffer that `ipc` goes through must hold the largest tensor; finding it takes all ranks.
        largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata()) if how == "ipc" else 0
        error = None
        try:
            self._engine = self._join(init_info(how, ranks, client, largest), source)
        except RunError as failure:
            error = str(failure)
        together(ranks, error)

    def send(self, policy: Any, version: int) -> None:
        self._engine.send_weights()
        error = self._control.error
        if self._ranks.first and error is None:
            try:
                self._client.wait(self._client.call("grpo_finish_load"))
            except RunError as failure:
                error = str(failure)
        together(self._ranks, error)

    def close(self) -> None:
        """Leave the group on both sides: a server of the user's own outlives the run."""
        if self._engine is None:
            return
        if self._ranks.first and self._control.error is None:
            path = "/shutdown_weight_transfer_engine"
            with contextlib.suppress(RunError):
                self._client.wait(self._client.everywhere("POST", path, timeout=_CLOSE_TIMEOUT_S, once=True))
        self._engine.shutdown()

    def _join(self, info: Any, source: Any) -> Any:
        """vLLM's trainer side, once the servers have met it; NCCL waits for ever for one that failed meanwhile."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        joined: Future[Any] = Future()

        def join() -> None:
            if self._ranks.device.type == "cuda":
                torch.cuda.set_device(self._ranks.device)  # each thread has a current device of its own
            try:
                joined.set_result(WeightTransferTrainerFactory.trainer_init(info, client=self._control, source=source))
            except BaseException as error:
                joined.set_exception(error)

        threading.Thread(target=join, name="weight-transfer", daemon=True).start()
        while not wait({joined}, timeout=0.5).done and self._control.error is None:
            pass
        if self._control.error is not None:
            raise RunError(self._control.error)
        return joined.result()

    def _give_up(self) -> None:
        """End the broadcast that this rank may stand in; what it still sends goes nowhere."""
        group = getattr(self._engine, "model_update_group", None)
        if group is None or group.disabled:
            return
        group.disabled = True  # before the communicator is gone: nothing more may go into it
        with torch.accelerator.device_index(group.device.index):
            group.nccl.ncclCommAbort(group.comm)


def init_info(how: str, ranks: Ranks, client: Client, largest: int) -> Any:
    """What vLLM's trainer side begins with. `largest`: bytes of the largest tensor."""
    if how == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        usual = IPCTrainerInitInfo(rank=ranks.rank, packed=True)
        room = max(usual.packed_buffer_size_bytes, largest)
        return IPCTrainerInitInfo(rank=ranks.rank, packed=True, packed_buffer_size_bytes=room)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    workers = sum(world_sizes(client)) if ranks.first else 0
    address = address_on_the_way_to(client.urls[0])
    return NCCLTrainerInitInfo(address, free_port(address), world_size=1 + workers, rank=ranks.rank)


def address_on_the_way_to(url: str) -> str:
    """Our own address on the way to a server: its workers find us there.

    >>> address_on_the_way_to("http://127.0.0.1:8000")
    '127.0.0.1'
    """
    parts = urlsplit(url)
    assert parts.hostname is not None, "rule server_url_valid"
    try:
        return address_towards(parts.hostname, parts.port or 80, socket.AF_INET)
    except OSError as error:
        raise RunError(f"There is no IPv4 route to the vLLM server at {url}: {error}") from error


def world_sizes(client: Client) -> list[int]:
    """Workers of each server."""
    return [answer["world_size"] for answer in client.wait(client.everywhere("GET", "/get_world_size"))]


def control_of(client: Client, give_up: Callable[[], None]) -> Any:
    """What vLLM's trainer side asks of the servers, through our client: with the key, and to all of them."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    class Control(HTTPVLLMWeightSyncClient):
        """The first failure is kept in `error` and not raised, and nothing more is asked: the transfer goes on without
        the servers, so that this rank is where the others are in each of its collectives."""

        def __init__(self) -> None:
            super().__init__(base_url="")
            self.error: str | None = None

        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            self._ask(lambda: client.everywhere("POST", f"/{path}", json=json, once=True))

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            self._ask(lambda: client.each("/init_weight_transfer_engine", self._infos(init_info), once=True))

        def _ask(self, request: Callable[[], Any]) -> None:
            if self.error is not None:
                return
            try:
                client.wait(request())
            except RunError as failure:
                self.error = str(failure)
                give_up()

        def _infos(self, init_info: dict[str, Any]) -> list[dict[str, Any]]:
            """One for each server: its workers come after those of the servers before it."""
            if "rank_offset" not in init_info:
                return [{"init_info": init_info}] * len(client.urls)
            infos, offset = [], init_info["rank_offset"]
            for size in world_sizes(client):
                infos.append({"init_info": {**init_info, "rank_offset": offset}})
                offset += size
            return infos

    return Control()


def source_of(policy: Any) -> Any:
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
