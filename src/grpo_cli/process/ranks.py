"""The processes of a run: who they are, what they exchange, which cores they use, how they leave."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from grpo_cli.machine import tell_deepspeed


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `world` equal ones; with one process every exchange is the identity."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def gather(self, item: Any) -> list[Any]:
        """The `item` of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item)
        return items

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks; the argument is left alone."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over the ranks; the argument is left alone."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on at least one rank: how ranks agree to stop together."""
        return bool(self.max(torch.tensor(float(flag), device=self.device)))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.world == 1:
            return tensor
        total = tensor.detach().clone().to(self.device)
        dist.all_reduce(total, op=op)
        return total.to(tensor.device)


def longest_wait_s(step_timeout_s: float) -> float:
    """Seconds that bound a collective of a run: long, since it only ends what nobody else sees.

    A rank that stands still is named by the watchdog after `trainer.step_timeout_s`, and a lost one breaks the
    connection. Before the first step the others wait here while one starts engines or reads a checkpoint, which may
    take much longer than a step; in a step, for a slow rank that moves.
    """
    return max(7200.0, 4 * step_timeout_s)


def start(timeout_s: float = 1800.0) -> Ranks:
    """Join the process group that the launcher's environment describes; without one, be a group of one.

    CPU ranks of one node get disjoint cores, so that they do not fight for them. `timeout_s` bounds every collective.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
        if local_world > 1:
            pin(local_rank, local_world)
    tell_deepspeed()
    if not dist.is_initialized():
        store = dist.HashStore() if world == 1 else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    return Ranks(rank, world, local_rank, device)


def share_of_cores(cores: list[int], local_rank: int, local_world: int) -> list[int]:
    """The contiguous share of `cores` of one local rank; with more ranks than cores, one core, shared in turn.

    >>> share_of_cores([0, 1, 2, 3, 4], 1, 2)
    [2, 3, 4]
    """
    if len(cores) < local_world:
        return [cores[local_rank % len(cores)]]
    return cores[local_rank * len(cores) // local_world : (local_rank + 1) * len(cores) // local_world]


def pin(local_rank: int, local_world: int) -> None:
    """Bind this process, and the processes that it starts, to its share of the node's cores."""
    share = share_of_cores(sorted(os.sched_getaffinity(0)), local_rank, local_world)
    os.sched_setaffinity(0, share)
    torch.set_num_threads(len(share))


def leave(code: int) -> NoReturn:
    """End this process at once with `code`, after everything written has reached the operating system.

    Interpreter shutdown is skipped: with several gloo ranks it sometimes aborts ("terminate called without an active
    exception"), even after the process group was destroyed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
