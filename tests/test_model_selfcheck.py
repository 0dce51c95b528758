"""A model that our shortcuts would score wrongly is refused before the first step."""

from __future__ import annotations

import pytest
import torch

from grpo_cli import batch
from grpo_cli.errors import ConfigError
from grpo_cli.model import attention
from grpo_cli.model.attention import Span
from grpo_cli.model.network import Scorer, load_causal_lm
from grpo_cli.model.selfcheck import check_scoring
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {f: tiny.tiny_model(tmp_path_factory.mktemp(f), f) for f in ("llama", "gpt2")}


def check(directory, *overrides: str, change=lambda lm: None) -> None:
    cfg = tiny.config(f"model.path={directory}", "rollout.temperature=0.7", *overrides)
    scorer = Scorer(load_causal_lm(cfg.model), cfg.rollout.temperature).eval()
    change(scorer.causal_lm)
    check_scoring(scorer, cfg, scorer.vocabulary, CPU)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("packing", ["none", "sequence", "shared_prefix"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ordinary_models_pass(models, family, packing, dtype):
    check(models[family], f"trainer.packing={packing}", f"model.dtype={dtype}")


def test_logits_that_the_model_changes_after_its_head(models):
    def sharpen(lm):
        def hook(module, args, output):
            output.logits = output.logits * 1.3
            return output

        lm.register_forward_hook(hook)

    with pytest.raises(ConfigError, match="treats its logits"):
        check(models["llama"], change=sharpen)


@pytest.mark.parametrize("packing", ["sequence", "shared_prefix"])
def test_attention_that_reads_neighbours(models, monkeypatch, packing):
    monkeypatch.setattr(batch, "make_plan", lambda spans: attention.make_plan([Span(0, sum(s.length for s in spans))]))
    with pytest.raises(ConfigError, match=f"trainer.packing={packing}"):
        check(models["llama"], f"trainer.packing={packing}")
