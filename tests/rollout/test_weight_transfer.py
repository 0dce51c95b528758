"""vLLM's own weight transfer, its trainer side, against a scripted server: nobody waits for a server that failed."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from grpo_cli.errors import RunError
from grpo_cli.rollout import weight_transfer
from grpo_cli.rollout.server_client import Client
from grpo_cli.rollout.weight_transfer import TransferSender, address_on_the_way_to, init_info
from tests.rollout.engines import RANKS, real_engine
from tests.rollout.scripted_server import ScriptedServer

pytestmark = real_engine  # nothing is started; vLLM's classes are used

WAIT_S = 60.0
NAMES = ["a.weight", "b.weight", "c.weight"]


class Policy:
    module = torch.nn.Linear(1, 1)

    def gathered_parameters(self):
        yield from ((name, torch.zeros(2, 2)) for name in NAMES)


class Group:
    """A NCCL communicator: a broadcast ends when the servers take part, or when it is aborted."""

    def __init__(self):
        self.disabled, self.device = False, torch.device("cuda", 0)
        self.comm, self.nccl = "comm", self
        self.aborted = threading.Event()
        self.entered = 0

    def broadcast(self, tensor, src):
        if self.disabled:
            return
        self.entered += 1
        assert self.aborted.wait(WAIT_S), "the broadcast waits for a server that is gone"

    def ncclCommAbort(self, comm):
        assert comm == "comm"
        assert self.disabled, "more could go into what is being aborted"
        self.aborted.set()


@pytest.fixture
def cluster(monkeypatch):
    """cluster(answers) -> (server, sender, what was sent): vLLM's NCCL sender with a scripted communicator."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    started = []
    sent: list[str] = []

    class Engine(NCCLTrainerWeightTransferEngine):
        def _broadcast(self, source, meta):
            for name, tensor in self._checked_iter(source, meta):
                self.model_update_group.broadcast(tensor, src=0)
                sent.append(name)

        def shutdown(self):
            sent.append("shutdown")

    def trainer_init(info, *, client, source):
        client.init_weight_transfer_engine({"rank_offset": 1})
        engine = Engine(client=client, source=source)
        engine.model_update_group = Group()
        return engine

    def make(answers):
        async def answer(path, body):
            return answers.get(path, {"world_size": 1, "results": [None]})

        server = ScriptedServer(answer)
        client = Client([server.url], None, [])
        started.extend([client, server])
        return server, TransferSender("nccl", Policy(), RANKS, client), sent

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    yield make
    for each in started:
        each.close()


@pytest.mark.parametrize("answer", [(500, {"error": "out of memory"}), None])
def test_a_server_that_fails_in_a_broadcast_ends_it(cluster, answer):
    """The rest of the weights is still gathered, as the other ranks do; nothing is told the server again."""
    server, sender, sent = cluster({"/update_weights": answer})
    with pytest.raises(RunError, match="out of memory" if answer else "does not answer POST"):
        sender.send(None, 1)
    assert sent == NAMES
    assert sender._engine.model_update_group.entered == 1
    assert server.paths()[-2:] == ["/start_weight_update", "/update_weights"]


def test_nothing_is_broadcast_to_a_server_that_refuses_to_begin(cluster):
    server, sender, sent = cluster({"/start_weight_update": (500, {"error": "a weight update is already active"})})
    with pytest.raises(RunError, match="already active"):
        sender.send(None, 1)
    assert sent == NAMES
    assert sender._engine.model_update_group.entered == 0
    assert server.paths()[-1] == "/start_weight_update"


def test_a_server_is_left_without_a_transfer_group(cluster):
    server, sender, sent = cluster({})
    sender.close()
    assert server.paths()[-1] == "/shutdown_weight_transfer_engine"
    assert sent == ["shutdown"]


def test_a_server_that_cannot_join_ends_the_meeting(cluster, monkeypatch):
    """vLLM's trainer side opens the meeting place and waits there for the workers."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    for_ever = threading.Event()

    def trainer_init(info, *, client, source):
        client.init_weight_transfer_engine({"rank_offset": 1})
        for_ever.wait(WAIT_S)

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    with pytest.raises(RunError, match="no such device"):
        cluster({"/init_weight_transfer_engine": (500, {"error": "no such device"})})
    for_ever.set()


def test_the_ipc_buffer_holds_the_largest_tensor(monkeypatch):
    """vLLM refuses a tensor above 1 GiB otherwise: the embedding of 151,936 x 8,192 weights in bfloat16 has 2.3."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    taken = []
    take = lambda info, *, client, source: taken.append(info)  # noqa: E731
    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", take)
    big = torch.empty(151_936, 8_192, dtype=torch.bfloat16, device="meta")
    policy = SimpleNamespace(gathered_parameters=lambda: iter([("norm", torch.zeros(4)), ("embed", big)]))
    TransferSender("ipc", policy, RANKS, SimpleNamespace(urls=["http://127.0.0.1:1"]))
    assert (taken[0].packed, taken[0].packed_buffer_size_bytes) == (True, 151_936 * 8_192 * 2)
    assert init_info("ipc", RANKS, None, 1000).packed_buffer_size_bytes == 2**30


def test_the_meeting_place_is_where_the_server_reaches_us(monkeypatch):
    assert address_on_the_way_to("http://127.0.0.1:8000") == "127.0.0.1"
    assert address_on_the_way_to("http://localhost") == "127.0.0.1"
    with pytest.raises(RunError, match=r"no IPv4 route to the vLLM server at http://nowhere\.invalid"):
        address_on_the_way_to("http://nowhere.invalid:8000")
    monkeypatch.setattr(weight_transfer, "address_on_the_way_to", {"http://gpu7:8000": "10.1.2.3"}.get)
    monkeypatch.setattr(weight_transfer, "free_port", {"10.1.2.3": 4000}.get)
    monkeypatch.setattr(weight_transfer, "world_sizes", lambda _: [2])
    info = init_info("nccl", RANKS, SimpleNamespace(urls=["http://gpu7:8000"]), 0)
    assert (info.master_address, info.master_port, info.world_size) == ("10.1.2.3", 4000, 3)
