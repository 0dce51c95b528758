"""The policy: model, DeepSpeed engine and optimizer, and what a step does with them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_cli.batch import Batch, MicroBatch
from grpo_cli.errors import GuardStop
from grpo_cli.loss import Measures, Tokens, policy_loss, prepare
from grpo_cli.model import weights
from grpo_cli.model.network import Scorer, training
from grpo_cli.model.selfcheck import check_scoring
from grpo_cli.model.tokenizer import load_tokenizer
from grpo_cli.passes import Passes, decide_passes
from grpo_cli.process.ranks import Ranks
from grpo_cli.process.signals import stop
from grpo_cli.schema import Config
from grpo_cli.trainer.engine import make_engine, make_reference
from grpo_cli.trainer.optimizer import lr_at


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one update did; loss and norm (of all ranks, before clipping) are nan where it was refused."""

    loss: float
    grad_norm: float
    applied: bool
    measures: Measures


class Policy:
    """The trained model of this rank. Every rank calls every method, in the same order."""

    def __init__(self, cfg: Config, ranks: Ranks, total_steps: int | None = None):
        """Load `model.path` and shard it as `trainer.zero_stage` says.

        `total_steps`: length of the run, for schedules that decay; None takes `trainer.steps`.
        """
        self.cfg, self.ranks = cfg, ranks
        self.total_steps = cfg.trainer.steps if total_steps is None else total_steps
        self.passes: Passes = decide_passes(cfg)
        self.tokenizer = load_tokenizer(cfg.model)
        self.version = 0
        self.nonfinite_steps = 0
        """Steps in a row, up to the last one, that were refused for a non-finite loss or gradient."""
        torch.manual_seed(cfg.run.seed)
        self.engine = make_engine(cfg, ranks)
        self.scorer: Scorer = self.engine.module
        check_scoring(self.engine, self.scorer, cfg, ranks.device)
        self.engine.empty_partition_cache()  # ZeRO-3 keeps what it gathered for the check
        self.reference = self._load_reference()

    @property
    def module(self) -> Any:
        """The transformers model (with adapters, if any), for generation inside `generation()`."""
        return self.scorer.lm

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def _load_reference(self) -> nn.Module | None:
        """The frozen start policy; None where nothing reads it, or where it is this model without its adapters."""
        if not self.passes.reference.runs or self.cfg.model.lora is not None:
            return None
        return make_reference(self.cfg, self.ranks)

    # ------------------------------------------------------------------------------------------------ scoring

    def add_logprobs(self, batch: Batch, passes: Passes | None = None) -> dict[str, float]:
        """Fill in the old and reference logprobs that something reads, and old entropies for the entropy quantile.

        Returns seconds by pass: `time/old_logprobs`, `time/ref_logprobs`, `time/old_entropies`, each only if it ran.
        """
        passes = passes or self.passes
        timings = {}
        selects = passes.entropies.runs
        if passes.old.runs or selects:
            start = self._now()
            for micro in batch.micro_batches:
                logprobs_T, entropy_T = self._inference(self.engine, micro, selects)
                if passes.old.runs:
                    micro.tokens.old_T = logprobs_T
                if selects:
                    micro.tokens.entropy_T = entropy_T
            timings["time/old_logprobs" if passes.old.runs else "time/old_entropies"] = self._now() - start
        if passes.reference.runs:
            start = self._now()
            reference = self.engine if self.reference is None else self.reference
            with self._without_adapters():
                for micro in batch.micro_batches:
                    micro.tokens.ref_T, _ = self._inference(reference, micro)
            timings["time/ref_logprobs"] = self._now() - start
        return timings

    @torch.no_grad()
    def _inference(self, scorer: Any, micro: MicroBatch, entropies: bool = False) -> tuple[Tensor, Tensor | None]:
        stop.rank_file.alive()
        return scorer(micro=micro, entropies=entropies)

    def _without_adapters(self) -> Any:
        return self.module.disable_adapter() if self.cfg.model.lora is not None else contextlib.nullcontext()

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
        """Logprobs of `completion_ids` behind `prompt_ids`, at the rollout temperature. Collective under ZeRO-3."""
        prompt, tokens = len(prompt_ids), len(completion_ids)
        ids = (prompt_ids + completion_ids)[:-1]  # nobody asks what follows the last one
        device = self.device
        micro = MicroBatch(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.arange(len(ids), device=device)[None],
            spans=None,
            plan=None,
            source_T=torch.arange(prompt - 1, prompt - 1 + tokens, device=device),
            targets_T=torch.tensor(completion_ids, device=device),
            tokens=Tokens(
                seq_T=torch.zeros(tokens, dtype=torch.long, device=device),
                length_N=torch.tensor([tokens], device=device),
                trained_N=torch.tensor([False], device=device),
                advantage_N=torch.zeros(1, device=device),
            ),
            sequences=[],
        )
        return self._inference(self.engine, micro)[0].tolist()

    # ------------------------------------------------------------------------------------------------ updating

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on `batch`: epochs x updates x micro-batches, one optimizer step an update. `step` counts from 1.

        An update without a trained token makes no optimizer step; neither does one whose loss or gradient is not
        finite, on any rank. The metrics of the latter are nan, never those of the others.
        """
        start = self._now()
        trainer = self.cfg.trainer
        metrics = prepare(batch.tokens, self.cfg, self.ranks.sum) if batch.micro_batches else {}
        outcomes: list[Outcome] = []
        first = (step - 1) * trainer.updates_per_step * trainer.epochs_per_step
        lr = tokens = 0.0
        for number in range(trainer.updates_per_step * trainer.epochs_per_step):
            lr = lr_at(first + number, trainer, self.total_steps)
            micro_batches = batch.updates[number % trainer.updates_per_step]
            if micro_batches and micro_batches[0].tokens.update_tokens:
                with training(self.module, self.cfg.model.gradient_checkpointing):
                    outcomes.append(self._one_update(micro_batches, lr))
                tokens += sum(micro.size for micro in micro_batches)
        metrics["lr"] = lr
        metrics |= self._summary(outcomes, trainer.updates_per_step * trainer.epochs_per_step)
        seconds = self._now() - start
        metrics["time/update"] = seconds
        if outcomes:
            metrics["update/tokens_per_s"] = float(self.ranks.sum(torch.tensor(tokens, device=self.device))) / seconds
        return metrics

    def _one_update(self, micro_batches: list[MicroBatch], lr: float) -> Outcome:
        measures = Measures()
        loss_sum = torch.zeros((), device=self.device)
        for number, micro in enumerate(micro_batches, start=1):
            stop.rank_file.alive()
            last = number == len(micro_batches)
            self.engine.set_gradient_accumulation_boundary(last)
            logprobs_T, entropy_T = self.engine(micro=micro)
            if micro.logprobs_T is None:
                micro.logprobs_T, micro.entropy_T = logprobs_T.detach(), entropy_T.detach()
            if self.cfg.loss.entropy_coef == 0:
                entropy_T = entropy_T.detach()
            loss, measured = policy_loss(logprobs_T, entropy_T, micro.tokens, self.cfg)
            measures.merge(measured)
            loss_sum += loss.detach()
            if last and not bool(loss_sum.isfinite()):
                # The engine refuses an update whose gradient norm is not finite, on all ranks: make it see this one.
                loss = loss * math.nan
            # The engine averages over ranks; the loss is a share of a sum over ranks.
            self.engine.backward(loss * self.ranks.world, scale_wrt_gas=False)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        applied = not self.engine.optimizer.overflow
        norm = float(self.engine.get_global_grad_norm())
        return Outcome(
            loss=float(self.ranks.sum(loss_sum)) if applied else math.nan,
            grad_norm=norm if applied else math.nan,
            applied=applied,
            measures=measures,
        )

    def _summary(self, outcomes: list[Outcome], planned: int) -> dict[str, float]:
        refused = sum(not outcome.applied for outcome in outcomes)
        self.nonfinite_steps = self.nonfinite_steps + 1 if refused else 0
        metrics: dict[str, float] = {
            "updates/applied_count": len(outcomes) - refused,
            "updates/empty_count": planned - len(outcomes),
            "updates/nonfinite_count": refused,
        }
        if not outcomes:
            return metrics
        measures = Measures()
        for outcome in outcomes:
            measures.merge(outcome.measures)
        metrics |= measures.reduced(self.ranks.sum, self.ranks.max).result()
        metrics["loss"] = math.fsum(outcome.loss for outcome in outcomes) / len(outcomes)
        metrics["grad_norm"] = math.fsum(outcome.grad_norm for outcome in outcomes) / len(outcomes)
        return metrics

    def raise_if_nonfinite(self, step: int) -> None:
        """End the run (GuardStop) after `trainer.max_nonfinite_steps` refused steps in a row; call it after logging."""
        limit = self.cfg.trainer.max_nonfinite_steps
        if self.nonfinite_steps >= limit:
            raise GuardStop(
                f"Loss or gradient was not finite in {self.nonfinite_steps} step(s) in a row, up to step {step}; none "
                f"of these updates was applied (trainer.max_nonfinite_steps={limit}). Try a lower trainer.lr, "
                "a trainer.max_grad_norm, or look at this step's rollouts."
            )

    # ------------------------------------------------------------------------------------------------ weights

    @contextlib.contextmanager
    def generation(self) -> Iterator[Any]:
        """The model, ready for plain forward passes of this rank alone: under ZeRO-3 gathered, and without hooks."""
        with weights.gathered(list(self.module.parameters())), self._no_hooks(), torch.no_grad():
            yield self.module

    @contextlib.contextmanager
    def _no_hooks(self) -> Iterator[None]:
        offload = getattr(self.engine.optimizer, "parameter_offload", None)
        if offload is None:
            yield
            return
        offload._remove_module_hooks()
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            yield
        finally:
            offload._register_deepspeed_module(offload.module)

    def gathered_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every weight; see `weights.full_parameters`. Collective under ZeRO-3."""
        return weights.full_parameters(self.module)

    # ------------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the engine's own state."""
        return {"version": self.version, "nonfinite_steps": self.nonfinite_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.version, self.nonfinite_steps = state["version"], state["nonfinite_steps"]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
