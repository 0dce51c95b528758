"""DeepSpeed's configuration from ours: numbers that multiply, one precision, clipping in one place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_cli.trainer.deepspeed_config import batch_numbers, engine_config
from tests import tiny


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_three_numbers_multiply(world):
    # F01
    numbers = batch_numbers(world)
    product = numbers["train_micro_batch_size_per_gpu"] * numbers["gradient_accumulation_steps"] * world
    assert numbers["train_batch_size"] == product


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_precision_or_none(stage, dtype):
    # F06; stage 0 has an optimizer of ours, which keeps float32 weights itself.
    config = engine_config(tiny.config(f"model.dtype={dtype}", f"trainer.zero_stage={stage}"), 1)
    assert "fp16" not in config
    assert ("bf16" in config) == (dtype == "bfloat16" and stage > 0)


@pytest.mark.parametrize("stage", range(4))
def test_clipping_happens_once(stage):
    # F08: DeepSpeed's default of 1.0 must never act on its own.
    bounded = engine_config(tiny.config("trainer.max_grad_norm=0.5", f"trainer.zero_stage={stage}"), 1)
    assert bounded["gradient_clipping"] == (0.5 if stage else 0.0)
    assert engine_config(tiny.config(f"trainer.zero_stage={stage}"), 1)["gradient_clipping"] == 0.0


def test_parameters_are_offloaded_where_they_are_sharded():
    config = engine_config(
        tiny.config("trainer.zero_stage=3", "trainer.offload_param=true", "trainer.offload_optimizer=true"), 1
    )
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }


def test_planning_needs_no_torch():
    code = "import sys, grpo_cli.trainer.deepspeed_config; assert not {'torch', 'deepspeed'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
