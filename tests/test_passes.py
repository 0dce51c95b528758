"""The decision table of the logprob passes, row by row, and every combination against one sentence each."""

from __future__ import annotations

import itertools

import pytest
from configs import make_config

from grpo_cli.passes import decide_passes

FORCE = "loss.force_on_policy_ratio=true"
THRESHOLD = "loss.seq_logprob_error_threshold=2.0"
KL = "loss.kl_coef=0.01"
KL_REWARD = "loss.use_kl_in_reward=true"
UPDATES = "trainer.updates_per_step=2"
EPOCHS = "trainer.epochs_per_step=2"


@pytest.mark.parametrize(
    ("overrides", "old", "why_old", "reference", "why_reference"),
    [
        ([], False, "One update a step", False, "kl_coef is 0"),
        ([FORCE], False, "ratio is 1 by definition", False, "kl_coef is 0"),
        ([FORCE, THRESHOLD], True, "seq_logprob_error_threshold", False, "kl_coef is 0"),
        ([FORCE, KL], False, "ratio is 1 by definition", True, "KL in the loss"),
        ([FORCE, THRESHOLD, KL], True, "seq_logprob_error_threshold", True, "KL in the loss"),
        ([FORCE, KL_REWARD], False, "ratio is 1 by definition", False, "kl_coef is 0"),
        ([UPDATES], True, "Several updates", False, "kl_coef is 0"),
        ([EPOCHS], True, "Several updates", False, "kl_coef is 0"),
        ([THRESHOLD], True, "seq_logprob_error_threshold", False, "kl_coef is 0"),
        ([KL], False, "One update a step", True, "KL in the loss"),
        ([KL, KL_REWARD], True, "use_kl_in_reward", True, "KL in the reward"),
        ([KL_REWARD], False, "One update a step", False, "kl_coef is 0"),
        ([UPDATES, KL], True, "Several updates", True, "KL in the loss"),
    ],
)
def test_the_table(overrides, old, why_old, reference, why_reference):
    passes = decide_passes(make_config(*overrides))
    assert (passes.old.runs, passes.reference.runs) == (old, reference)
    assert why_old in passes.old.reason
    assert why_reference in passes.reference.reason
    assert passes.any == (old or reference)


def test_the_entropy_quantile_asks_for_entropies_before_the_update():
    assert not decide_passes(make_config()).any
    passes = decide_passes(make_config("loss.top_entropy_quantile=0.2", FORCE))
    assert (passes.old.runs, passes.entropies.runs, passes.any) == (False, True, True)
    assert "top_entropy_quantile is 0.2" in passes.entropies.reason


@pytest.mark.parametrize("chosen", list(itertools.product([False, True], repeat=6)))
def test_every_combination(chosen):
    """OLD_PASS and the reference pass as validation-rules.md abbreviates them."""
    switches = (FORCE, THRESHOLD, KL, KL_REWARD, UPDATES, EPOCHS)
    cfg = make_config(*(switch for switch, on in zip(switches, chosen, strict=True) if on))
    force, threshold, kl, in_reward, updates, epochs = chosen
    passes = decide_passes(cfg)
    assert passes.old.runs == (threshold if force else (updates or epochs or (kl and in_reward) or threshold))
    assert passes.reference.runs == kl
