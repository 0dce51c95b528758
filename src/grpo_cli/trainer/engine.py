"""The DeepSpeed engine of the policy, and the frozen reference beside it."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import warnings
from typing import Any
from unittest import mock

import torch
from torch import nn

from grpo_cli.model.network import Scorer, add_lora, load_causal_lm
from grpo_cli.process.ranks import Ranks
from grpo_cli.schema import Config
from grpo_cli.trainer.deepspeed_config import engine_config, reference_config
from grpo_cli.trainer.optimizer import ReplicatedAdamW


def make_engine(cfg: Config, ranks: Ranks) -> Any:
    """`model.path` behind a Scorer behind an engine with AdamW, sharded as `trainer.zero_stage` says."""
    deepspeed = _deepspeed(ranks)
    settings = engine_config(cfg, ranks.world)
    lm = load_causal_lm(cfg.model)
    if cfg.model.lora is not None:
        lm = add_lora(lm, cfg.model)
    if cfg.model.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    scorer = Scorer(lm, cfg.rollout.temperature).eval()
    if cfg.trainer.zero_stage == 3:
        _shard(scorer, settings, ranks)
    else:
        scorer.to(ranks.device)  # before the optimizer takes hold of the parameters
    with contextlib.redirect_stdout(io.StringIO()):  # memory reports; what fails is raised
        return deepspeed.initialize(model=scorer, optimizer=_optimizer(scorer, cfg), config=settings)[0]


def _optimizer(scorer: nn.Module, cfg: Config) -> torch.optim.Optimizer:
    trainer = cfg.trainer
    parameters = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
    adam: dict[str, Any] = {
        "lr": trainer.lr,
        "betas": tuple(trainer.betas),
        "weight_decay": trainer.weight_decay,
        "fused": True,
    }
    if trainer.zero_stage == 0:
        return ReplicatedAdamW(parameters, trainer.max_grad_norm, **adam)
    return torch.optim.AdamW(parameters, **adam)


def make_reference(cfg: Config, ranks: Ranks) -> nn.Module:
    """The model of `model.path`, frozen; under ZeRO-3 behind an engine of its own, which only shards it."""
    lm = load_causal_lm(cfg.model).requires_grad_(False)
    scorer = Scorer(lm, cfg.rollout.temperature).eval()
    if cfg.trainer.zero_stage < 3:
        return scorer.to(ranks.device)
    settings = reference_config(cfg, ranks.world)
    _shard(scorer, settings, ranks)
    return _deepspeed(ranks).initialize(model=scorer, config=settings)[0]


def _shard(scorer: nn.Module, settings: dict[str, Any], ranks: Ranks) -> None:
    """Move the model to this rank's device one parameter at a time, and keep only this rank's part of each.

    Partitioning while loading (`zero.Init` around the constructor) would also save the copy in CPU memory, but makes
    every buffer in the parameters' type: rotary frequencies in bfloat16 move the gradient norm by one per cent.
    """
    deepspeed = _deepspeed(ranks)
    deepspeed.init_distributed(
        auto_mpi_discovery=False, verbose=False
    )  # before it, a config that is read counts one process
    deepspeed.zero.Init(module=scorer, config_dict_or_path=settings)
    for buffer in scorer.buffers():
        buffer.data = buffer.data.to(ranks.device)


def _deepspeed(ranks: Ranks) -> Any:
    """DeepSpeed, without what it would build, warn about or ask of the environment."""
    # It asserts that a launcher has set this, also where there is none.
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))
    import deepspeed

    # Nothing here uses its compiled operators; looking for them takes seconds, and building the one for collectives of
    # inference on a CPU takes a minute and writes to the console.
    deepspeed.ops.__compatible_ops__ = {}
    # Nor its optimizer Muon, whose decorators make torch load its whole compiler when AdamW is looked at: 1.5 s.
    with mock.patch.object(torch, "compile", lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    # It calls collectives by names that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return deepspeed
