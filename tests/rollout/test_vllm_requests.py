"""What the engine is started with; no engine is needed to see it."""

from __future__ import annotations

import pytest

from grpo_cli.rollout.vllm_requests import engine_options
from tests.configs import make_config


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_the_model_runs_in_the_engine_only_where_it_may_in_the_trainer(trusted):
    """Case L01."""
    cfg = make_config("experiment=smoke", "rollout=vllm")
    model = cfg.model.model_copy(update={"trust_remote_code": trusted})
    options = engine_options(cfg.model_copy(update={"model": model}), on_cpu=False, engines_here=1)
    assert options["trust_remote_code"] is trusted
    assert options["dtype"] == "float32"  # D06: rollout.dtype=auto is the type of the trainer
    assert options["generation_config"] == "vllm"  # the model's own top-p and the like must not act
