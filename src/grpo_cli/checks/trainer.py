"""Rules of the trainer: optimizer, ZeRO, offload, intervals and checkpoints."""

from __future__ import annotations

from pathlib import Path

from grpo_cli.checks.engine import Found, View, broken, declare, error, ge, gt, le, lt, state, warning
from grpo_cli.checks.quantities import processes


@error("trainer.lr")
def lr_positive(c: View) -> Found:
    """With a learning rate of 0 nothing trains, with a negative one the loss is climbed."""
    if le(c.trainer.lr, 0):
        yield broken(f"{state(c, 'trainer.lr')} is not positive.", {"trainer.lr": 1e-6})


@warning("trainer.lr", "model.lora")
def lr_plausible_for_full_training(c: View) -> Found:
    """At such a rate a pretrained model collapses within a few steps when all its weights are trained."""
    if c.model.lora is None and gt(c.trainer.lr, 1e-4):
        yield broken(
            f"{state(c, 'trainer.lr')} is above 1e-4 for training all weights (model.lora=null).", {"trainer.lr": 1e-6}
        )


@warning("trainer.lr", "model.lora")
def lr_large_enough_for_lora(c: View) -> Found:
    """Adapters need about ten times the rate of full training; this barely moves them."""
    if c.model.lora is not None and gt(c.trainer.lr, 0) and lt(c.trainer.lr, 5e-6):
        yield broken(f"{state(c, 'trainer.lr')} is below 5e-6 for an adapter (model.lora).", {"trainer.lr": 2e-5})


@error("trainer.betas")
def betas_in_unit_interval(c: View) -> Found:
    """Adam takes two decay rates in [0, 1). With others it divides by zero or never forgets."""
    betas = c.trainer.betas
    if len(betas) != 2 or any(beta < 0 or beta >= 1 for beta in betas):
        yield broken(f"{state(c, 'trainer.betas')} are not two rates in [0, 1).", {"trainer.betas": [0.9, 0.999]})


@error("trainer.weight_decay")
def weight_decay_not_negative(c: View) -> Found:
    """With a negative decay the weights grow at every step."""
    if lt(c.trainer.weight_decay, 0):
        yield broken(f"{state(c, 'trainer.weight_decay')} lets the weights grow.", {"trainer.weight_decay": 0.0})


@error("trainer.max_grad_norm")
def max_grad_norm_positive(c: View) -> Found:
    """Readers disagree on 0: some remove every gradient, some switch clipping off. Null is off."""
    if le(c.trainer.max_grad_norm, 0):
        yield broken(
            f"{state(c, 'trainer.max_grad_norm')} is not positive.",
            {"trainer.max_grad_norm": 1.0},
            {"trainer.max_grad_norm": None},
        )


@error("trainer.zero_stage", "trainer.offload_optimizer")
def offload_optimizer_needs_zero1(c: View) -> Found:
    """Stage 0 ignores trainer.offload_optimizer silently and keeps the memory."""
    if c.trainer.offload_optimizer and c.trainer.zero_stage == 0:
        yield broken(
            "trainer.offload_optimizer=true is ignored at trainer.zero_stage=0.",
            {"trainer.zero_stage": 1},
            {"trainer.offload_optimizer": False},
        )


@error("trainer.zero_stage", "trainer.offload_param")
def offload_param_needs_zero3(c: View) -> Found:
    """Below stage 3 parameters are not partitioned: DeepSpeed ignores trainer.offload_param silently."""
    if c.trainer.offload_param and c.trainer.zero_stage != 3:
        yield broken(
            f"trainer.offload_param=true is ignored at trainer.zero_stage={c.trainer.zero_stage}.",
            {"trainer.zero_stage": 3},
            {"trainer.offload_param": False},
        )


@warning("trainer.zero_stage", "trainer.nproc_per_node", "trainer.nnodes")
def zero3_needs_several_processes(c: View) -> Found:
    """One process has nothing to partition; only the gathers are paid."""
    trainer = c.trainer
    if trainer.zero_stage == 3 and processes(c) == 1 and not trainer.offload_optimizer and not trainer.offload_param:
        yield broken("trainer.zero_stage=3 has nothing to partition in one process.", {"trainer.zero_stage": 2})


@error("trainer.resume")
def resume_path_exists(c: View) -> Found:
    """trainer.resume is auto, never or the path of a checkpoint. A misspelt path would train from scratch."""
    resume = c.trainer.resume
    if resume not in ("auto", "never") and not _exists(resume):
        yield broken(f"{state(c, 'trainer.resume')}: no such path.", {"trainer.resume": "auto"})


@warning("trainer.save_every", "trainer.eval_every", "trainer.steps")
def intervals_within_run(c: View) -> Found:
    """An interval longer than the run never comes round."""
    late = [f"trainer.{key}" for key in ("save_every", "eval_every") if gt(getattr(c.trainer, key), c.trainer.steps)]
    if late:
        steps = c.trainer.steps
        yield broken(
            f"{state(c, *late)} is more than trainer.steps={steps}: it never happens.",
            dict.fromkeys(late, steps),
            dict.fromkeys(late),
        )


@warning("trainer.save_every", "trainer.steps")
def long_run_needs_checkpoints(c: View) -> Found:
    """Without checkpoints a crash loses everything; trainer.resume has nothing to find."""
    if c.trainer.save_every is None and (c.trainer.steps is None or ge(c.trainer.steps, 100)):
        yield broken(
            f"trainer.save_every=null saves nothing in a run of {state(c, 'trainer.steps', 'trainer.epochs')}.",
            {"trainer.save_every": 50},
        )


@error("trainer.keep_checkpoints")
def keep_checkpoints_positive(c: View) -> Found:
    """Rotation would delete the checkpoint that was just written. Null keeps all."""
    if lt(c.trainer.keep_checkpoints, 1):
        yield broken(
            f"{state(c, 'trainer.keep_checkpoints')} keeps no checkpoint.",
            {"trainer.keep_checkpoints": 1},
            {"trainer.keep_checkpoints": None},
        )


def _exists(path: str) -> bool:
    try:
        return bool(path) and Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


declare(
    "processes_fit_devices", "error", "trainer", "start", "trainer.nproc_per_node", "rollout.devices",
    why="""Accelerators are present, and trainer.nproc_per_node and rollout.devices together ask for more than are
    visible. Two processes would share a device: out of memory, or NCCL refuses. Lower trainer.nproc_per_node.""",
)  # fmt: skip
declare(
    "dtype_supported", "error", "trainer", "start", "model.dtype", "rollout.dtype",
    why="""model.dtype or rollout.dtype is bfloat16 on a device without it: a late assertion, or emulation many times
    slower. Use float32 for both.""",
)  # fmt: skip
declare(
    "offload_needs_an_accelerator", "warning", "trainer", "start", "trainer.offload_optimizer", "trainer.offload_param",
    why="""Without an accelerator everything is on the CPU already; offloading only adds copies. Switch both off.""",
)  # fmt: skip
declare(
    "resume_checkpoint_complete", "error", "trainer", "start", "trainer.resume",
    why="""trainer.resume is a checkpoint whose manifest, sizes or hashes do not hold. Half-written state would resume
    into garbage. Name an older checkpoint.""",
)  # fmt: skip
declare(
    "resume_matches_run", "error", "trainer", "start", "trainer.resume", "model.path", "data.train",
    why="""Checkpoint and config differ in model.path or in the data by content. Optimizer state and data order no
    longer belong to this run. Restore the listed keys, or set trainer.resume=never in a new run.""",
)  # fmt: skip
declare(
    "resume_config_unchanged", "warning", "trainer", "start", "trainer.resume",
    why="""Checkpoint and config differ elsewhere (apart from a higher trainer.steps where trainer.lr_schedule is
    constant; otherwise every learning rate depends on it). The curve changes for a reason that the log does not show.
    Restore the listed keys.""",
)  # fmt: skip
