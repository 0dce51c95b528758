"""The float32 weights and Adam moments of this rank, whatever the ZeRO stage: which slice of which parameter lies
where.

A checkpoint holds slices by parameter name and flat position, so that any number of ranks at any stage can read it
back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `start + numel` of the flattened parameter `name`, at `offset` of the optimizer's tensor
    `flat`."""

    name: str
    start: int
    numel: int
    flat: Tensor
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """These elements in `flat` itself, or in a moment of it: a view [numel]."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


class ZeroState:
    """Reads and writes the optimizer state of a `Policy`'s engine in place."""

    def __init__(self, policy: Any):
        self._engine = policy.engine
        self._rank, self._world = policy.ranks.rank, policy.ranks.world
        self.stage: int = policy.cfg.trainer.zero_stage
        self.parameters = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self._zero = self._engine.optimizer
        self.adam: torch.optim.Optimizer = self._zero if self.stage == 0 else self._zero.optimizer

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> whole shape of every trained parameter, sharded or not."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.parameters.items()}

    def held(self) -> Iterator[Slice]:
        """What this rank holds of every parameter; a rank may hold nothing of some."""
        if self.stage == 0:
            masters = {id(parameter): master for parameter, master in self._zero._pairs}
            for name, parameter in self.parameters.items():
                yield Slice(name, 0, parameter.numel(), masters[id(parameter)], 0)
        elif self.stage < 3:
            flats = self._flats()
            for name, parameter in self.parameters.items():
                mapping = parameter._hp_mapping
                if mapping is not None:
                    start, place = mapping.lp_fragment_address.start, mapping.hp_fragment_address
                    yield Slice(name, start, place.numel, flats[mapping.param_group_index], place.start)
        else:
            for name, parameter in self.parameters.items():
                group, offset, padded = self._zero.grad_position[self._zero.get_param_id(parameter)]
                start = padded * self._rank
                numel = min(padded, parameter.ds_numel - start)  # the last partition is filled up with padding
                if numel > 0:
                    yield Slice(name, start, numel, self._zero.fp32_partitioned_groups_flat[group], offset)

    def owned(self) -> Iterator[Slice]:
        """What this rank writes: over all ranks every element once. At stage 0, where each holds all, an equal
        share."""
        for piece in self.held():
            if self.stage == 0:
                start, end = (piece.numel * r // self._world for r in (self._rank, self._rank + 1))
                piece = Slice(piece.name, start, end - start, piece.flat, start)
            if piece.numel:
                yield piece

    @property
    def steps(self) -> int:
        """Optimizer steps taken; 0 where no moments exist yet."""
        taken = {int(state["step"]) for state in self.adam.state.values() if "step" in state}
        assert len(taken) <= 1, f"parameters disagree on the number of optimizer steps: {taken}"
        return taken.pop() if taken else 0

    def tensors(self, piece: Slice) -> dict[str, Tensor]:
        """Kind -> view [numel] of the float32 weight and, once they exist, of both moments."""
        views = {WEIGHT: piece.of(piece.flat)}
        state = self.adam.state.get(piece.flat, {})
        return views | {kind: piece.of(state[kind]) for kind in MOMENTS if kind in state}

    def allocate(self, steps: int) -> None:
        """Make moments for an optimizer that has taken `steps` steps, to be filled in through `tensors`."""
        self.adam.state.clear()
        if steps == 0:
            return
        fused = bool(self.adam.defaults.get("fused"))
        for flat in self._flats():
            self.adam.state[flat] = {
                "step": torch.tensor(float(steps), device=flat.device if fused else "cpu"),
                **{kind: torch.zeros_like(flat, memory_format=torch.preserve_format) for kind in MOMENTS},
            }

    def _flats(self) -> list[Tensor]:
        """The tensors that Adam's state is kept by. (Stage 3 takes them out of the parameter groups between steps.)"""
        if self.stage == 0:
            return [master for _, master in self._zero._pairs]
        if self.stage == 3:
            return self._zero.fp32_partitioned_groups_flat
        # For stage 1 in bfloat16 DeepSpeed has a class of its own (BF16_Optimizer, without offload only), which has
        # the same partition under another name.
        if hasattr(self._zero, "fp32_groups_flat_partition"):
            return self._zero.fp32_groups_flat_partition
        return self._zero.single_partition_of_fp32_groups

    @torch.no_grad()
    def publish(self) -> None:
        """Round the float32 weights into the model that computes. Collective."""
        if self.stage == 0:
            for parameter, master in self._zero._pairs:
                if parameter is not master:
                    parameter.copy_(master)
        elif self.stage < 3:
            self._zero.update_lp_params()
        else:
            self._zero.checkpoint_event_prologue()  # small parameters stay whole on every rank: drop the old values
            for group in range(len(self._zero.fp32_partitioned_groups_flat)):
                self._zero._reassign_or_swap_out_partitioned_parameters(group)
            self._zero.checkpoint_event_epilogue()
