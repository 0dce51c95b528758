"""The optimizer of an unsharded engine (ZeRO stage 0), and the learning rate as a function of the update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_cli.schema import Trainer


def lr_at(update: int, trainer: Trainer, total_steps: int | None) -> float:
    """Learning rate of update `update`, counted from 0 over the whole run, empty and refused updates included.

    Warm-up rises linearly to `trainer.lr`, which the last update of step `warmup_steps` has; then the schedule runs
    until update `total_steps` x updates a step. `total_steps` is read by the schedules that decay.
    """
    updates_per_step = trainer.updates_per_step * trainer.epochs_per_step
    warmup = trainer.warmup_steps * updates_per_step
    if update < warmup:
        return trainer.lr * (update + 1) / warmup
    if trainer.lr_schedule == "constant":
        return trainer.lr
    assert total_steps is not None, "a schedule that decays needs the length of the run"
    progress = min(1.0, (update - warmup) / max(1, total_steps * updates_per_step - warmup))
    if trainer.lr_schedule == "linear":
        return trainer.lr * (1 - progress)
    return trainer.lr * (1 + math.cos(math.pi * progress)) / 2


class ReplicatedAdamW(torch.optim.AdamW):
    """AdamW whose every rank holds all of float32 weights, gradients and moments, behind a DeepSpeed stage 0 engine.

    DeepSpeed's own stage 0 is not used for it: in bfloat16 it accumulates and reduces gradients in bfloat16, and its
    optimizer takes one step with zero gradients at construction, so that Adam's bias correction is one step ahead of
    the moments and the first updates are a quarter too small; in float32 it neither measures the gradient norm nor
    refuses a non-finite one. Here each gradient moves to its float32 weight as soon as it is accumulated; the engine
    reduces those (it asks for `get_grads_for_reduction`), and `step` clips, or refuses when the norm is not finite.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], max_grad_norm: float | None, **adam: Any):
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for parameter in parameters:
            master = parameter
            if parameter.dtype != torch.float32:
                master = torch.nn.Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))
            self._pairs.append((parameter, master))
        self.max_grad_norm = max_grad_norm
        self.overflow = False
        self._global_grad_norm: Tensor | None = None
        super().__init__([master for _, master in self._pairs], **adam)

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The gradients that the engine averages over the ranks, a missing one as zeros; in one process none."""
        if dist.get_world_size() == 1:
            return [], {}
        return self._gradients(), {}

    def _gradients(self) -> list[Tensor]:
        for _, master in self._pairs:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for _, master in self._pairs if master.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and apply, or refuse: then `overflow` is set and neither weights nor moments have changed."""
        gradients = self._gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        self._global_grad_norm = norm
        self.overflow = not bool(norm.isfinite())
        if not self.overflow:
            if self.max_grad_norm is not None:
                torch._foreach_mul_(gradients, 1 / torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0))
            super().step(closure)
            for parameter, master in self._pairs:
                if parameter is not master:
                    parameter.copy_(master)
        self.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Moments, and the float32 weights, which the model itself has only rounded."""
        return {**super().state_dict(), "masters": [master.detach() for _, master in self._pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        masters = state_dict["masters"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "masters"})
        for (parameter, master), saved in zip(self._pairs, masters, strict=True):
            master.copy_(saved)
            parameter.copy_(saved)


def _move_gradient_to(master: Tensor) -> Any:
    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return move
