"""DeepSpeed's own configuration, derived from `trainer.*`. Imports no torch: `plan` prints the batch numbers."""

from __future__ import annotations

from typing import Any

from grpo_cli.schema import Config


def batch_numbers(world: int) -> dict[str, int]:
    """DeepSpeed's batch triple, which must multiply: samples an update = samples a pass x accumulation x processes.

    The trainer counts tokens itself and says itself where an update ends, so each pass is one "sample" and accumulation
    is 1, whatever the number of micro-batches.
    """
    return {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}


def engine_config(cfg: Config, world: int) -> dict[str, Any]:
    """The engine's configuration for `world` processes.

    Stage 0 declares no precision and no clipping: there `optimizer.ReplicatedAdamW` does both (see there why).
    Gradients of bfloat16 models are accumulated and reduced in float32.
    """
    trainer = cfg.trainer
    config: dict[str, Any] = {
        **batch_numbers(world),
        "zero_optimization": {"stage": trainer.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "gradient_clipping": 0.0,  # off; unset it would be 1.0
    }
    if trainer.zero_stage == 0:
        return config
    config["gradient_clipping"] = trainer.max_grad_norm or 0.0
    config["communication_data_type"] = "fp32"
    if cfg.model.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if trainer.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if trainer.zero_stage == 3:
        config["zero_optimization"] |= sharded_parameters(cfg)
    return config


def sharded_parameters(cfg: Config) -> dict[str, Any]:
    """The part of `zero_optimization` that shards parameters, for the policy and for a reference beside it."""
    sharding: dict[str, Any] = {"stage": 3}
    if cfg.trainer.offload_param:
        sharding["offload_param"] = {"device": "cpu"}
    return sharding


def reference_config(cfg: Config, world: int) -> dict[str, Any]:
    """An engine without optimizer that only shards a frozen model (ZeRO-3)."""
    config: dict[str, Any] = {
        **batch_numbers(world),
        "zero_optimization": sharded_parameters(cfg),
        "steps_per_print": None,
    }
    if cfg.model.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    return config
