"""A model that our shortcuts would score wrongly is refused before the first step."""

from __future__ import annotations

import pytest
import torch

from grpo_cli import batch
from grpo_cli.errors import ConfigError
from grpo_cli.model import attention, network
from grpo_cli.model.attention import Span
from grpo_cli.model.network import Scorer, load_causal_lm
from grpo_cli.model.selfcheck import check_scoring
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    families = ("llama", "gpt2", "mistral", "gemma2", "qwen2", "lfm2")
    return {f: tiny.tiny_model(tmp_path_factory.mktemp(f), f) for f in families}


def check(directory, *overrides: str, change=lambda lm: None) -> None:
    cfg = tiny.config(f"model.path={directory}", "rollout.temperature=0.7", *overrides)
    scorer = Scorer(load_causal_lm(cfg.model), cfg.rollout.temperature).eval()
    change(scorer.causal_lm)
    check_scoring(scorer, scorer, cfg, CPU)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("packing", ["none", "sequence", "shared_prefix"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ordinary_models_pass(models, family, packing, dtype):
    check(models[family], f"trainer.packing={packing}", f"model.dtype={dtype}")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sliding_windows_pass(models, family, attention):
    check(models[family], "trainer.packing=shared_prefix", f"model.attn_implementation={attention}")


def test_logits_that_the_model_changes_after_its_head(models):
    def sharpen(lm):
        def hook(module, args, output):
            output.logits = output.logits * 1.3
            return output

        lm.register_forward_hook(hook)

    with pytest.raises(ConfigError, match=r"treats its logits.*Fix: another model\.path"):
        check(models["llama"], "trainer.packing=none", change=sharpen)


# The check has four sequences: with four updates a step, each would be alone.
@pytest.mark.parametrize("updates", [1, 2, 4, 8])
@pytest.mark.parametrize("packing", ["sequence", "shared_prefix"])
def test_attention_that_reads_neighbours(models, monkeypatch, packing, updates):
    monkeypatch.setattr(batch, "make_plan", lambda spans: attention.make_plan([Span(0, sum(s.length for s in spans))]))
    with pytest.raises(ConfigError, match=f"trainer.packing={packing}"):
        check(models["llama"], f"trainer.packing={packing}", f"trainer.updates_per_step={updates}")


def test_sequences_longer_than_half_a_micro_batch_are_checked_together(models, monkeypatch):
    monkeypatch.setattr(batch, "make_plan", lambda spans: attention.make_plan([Span(0, sum(s.length for s in spans))]))
    with pytest.raises(ConfigError, match="ignores the packing"):
        check(models["llama"], "trainer.packing=sequence", "trainer.micro_batch_tokens=1")


@pytest.mark.parametrize("packing", ["sequence", "shared_prefix"])
@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_convolution_that_reads_neighbours(models, packing, updates, kernel):
    """LFM2: what a mask hides from attention, the convolutions before it have read."""
    overrides = (f"trainer.updates_per_step={updates}", f"model.attn_implementation={kernel}")
    check(models["lfm2"], "trainer.packing=none", *overrides)
    with pytest.raises(ConfigError, match=r"ignores the packing.*Fix: trainer\.packing=none; if"):
        check(models["lfm2"], f"trainer.packing={packing}", *overrides)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen2"])
def test_a_window_that_the_masks_lack(models, monkeypatch, family):
    monkeypatch.setattr(network, "_windows", lambda config: {"full_attention": None})
    overrides = ("trainer.packing=sequence", "model.attn_implementation=eager")
    with pytest.raises(ConfigError, match="ignores the packing"):
        check(models[family], *overrides)
    # Sequences of 8 + 8 tokens stay within the window of 16.
    check(models[family], *overrides, "data.max_prompt_tokens=8", "rollout.max_new_tokens=8")


@pytest.mark.parametrize("key", ["attention_chunk_size", "window_size"])
@pytest.mark.parametrize(("reach", "refused"), [(79, True), (80, False)])
def test_chunks_shorter_than_a_sequence_cannot_be_packed(models, key, reach, refused):
    def give_chunks(lm):
        setattr(lm.config, key, reach)

    # Up to 64 + 16 tokens.
    overrides = ("data.max_prompt_tokens=64", "rollout.max_new_tokens=16", "trainer.packing=sequence")
    if refused:
        with pytest.raises(ConfigError, match=r"read 79 tokens.*up to 80.*trainer\.packing=none"):
            check(models["llama"], *overrides, change=give_chunks)
    else:
        check(models["llama"], *overrides, change=give_chunks)
