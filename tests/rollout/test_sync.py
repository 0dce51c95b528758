"""The sync check, with an engine and a trainer whose weights and logprobs are given."""

from __future__ import annotations

import types

import pytest
import torch

from grpo_cli.errors import GuardStop
from grpo_cli.rollout import sync

FAMILIES = [
    "model.embed_tokens.weight",
    "model.layers.*.self_attn.q_proj.weight",
    "model.layers.*.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


class OneRank:
    rank, world = 0, 1

    def gather(self, value):
        return [value]


class Tokenizer:
    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return list(text.encode())


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ]
    return {name: torch.randn(4, 4, generator=generator) for name in names}


class Policy:
    """A trainer with tied embeddings whose logprob of every token is `logprob`."""

    tokenizer = Tokenizer()

    def __init__(self, logprob: float = -1.0):
        self.weights = weights()
        self.logprob = logprob
        self.module = types.SimpleNamespace(
            _tied_weights_keys={"lm_head.weight": "model.embed_tokens.weight"},
            config=types.SimpleNamespace(tie_word_embeddings=True),
        )

    def gathered_parameters(self):
        yield from self.weights.items()

    def score(self, prompt_ids, completion_ids):
        return [self.logprob] * len(completion_ids)


def engine(logprob: float, held: dict[str, torch.Tensor]):
    def score(prompt_ids, completion_ids):
        return [logprob] * len(completion_ids)

    def weight_gap(name, tensor):
        return sync.relative_gap(tensor, held[name]) if name in held else None

    return score, weight_gap


def test_small_gap_passes_and_is_reported():
    score, weight_gap = engine(-1.0 - 2e-5, {})
    metrics = sync.check_sync(Policy(), OneRank(), score, weight_gap, tolerance=0.01)
    assert metrics.pop("time/sync_check") > 0.0
    assert metrics == {"sync/logprob_gap_max": pytest.approx(2e-5, abs=1e-9)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_that_differs_is_named_and_no_other(family):
    held = {name: tensor.clone() for name, tensor in weights().items()}
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    corrupted = family.replace("*", "1")
    held[corrupted][0, 0] += 0.5
    score, weight_gap = engine(-1.2, held)
    with pytest.raises(GuardStop) as stop:
        sync.check_sync(Policy(), OneRank(), score, weight_gap, tolerance=0.05)
    message = str(stop.value)
    assert [name for name in FAMILIES if name in message] == [family]
    assert "rollout.sync_tolerance=0.05" in message
    assert "0.2 nats" in message


def test_a_gap_that_is_not_a_number_stops():
    score, _ = engine(float("nan"), {})
    with pytest.raises(GuardStop, match="cannot be read"):
        sync.check_sync(Policy(), OneRank(), score, None, tolerance=0.05)


@pytest.mark.parametrize(("gap", "passes"), [(0.16, True), (0.18, False)])
def test_the_tolerance_counts_beyond_what_rounding_explains(gap, passes):
    class Rounding(Policy):
        """Longer rows move its logprobs by 0.02 and 0.06: 0.05 + 2 * 0.06 = 0.17 are allowed."""

        def score(self, prompt_ids, completion_ids):
            moved = {4: 0.0, 8: 0.02, 12: 0.06}[len(completion_ids)]
            return [self.logprob + moved] * len(completion_ids)

    score, weight_gap = engine(-1.0 - gap, {name: tensor.clone() for name, tensor in weights().items()})
    if passes:
        metrics = sync.check_sync(Rounding(), OneRank(), score, weight_gap, tolerance=0.05)
        assert metrics["sync/logprob_gap_max"] == pytest.approx(gap)
        assert metrics["sync/rounding_max"] == pytest.approx(0.06)
    else:
        with pytest.raises(GuardStop, match=r"own rounding 0\.06"):
            sync.check_sync(Rounding(), OneRank(), score, weight_gap, tolerance=0.05)


def test_rounding_is_not_measured_without_a_gap():
    policy = Policy()
    policy.score = lambda prompt_ids, completion_ids: {4: [-1.0] * 4}[len(completion_ids)]
    metrics = sync.check_sync(policy, OneRank(), None, None, tolerance=0.05)
    assert metrics.keys() == {"sync/logprob_gap_max", "time/sync_check"}
    assert metrics["sync/logprob_gap_max"] == 0.0


def test_equal_weights_point_elsewhere():
    held = {name: tensor.clone() for name, tensor in weights().items()}
    score, weight_gap = engine(-1.2, held)
    with pytest.raises(GuardStop, match="All weights are equal"):
        sync.check_sync(Policy(), OneRank(), score, weight_gap, tolerance=0.05)


def test_the_rank_with_the_gap_decides_for_all():
    others = iter([0.3, 0.0, {"model.norm.weight": 0.1}])  # its gap, its rounding, its families

    class TwoRanks(OneRank):
        def gather(self, value):
            return [value, next(others)]

    with pytest.raises(GuardStop, match=r"model\.norm\.weight"):
        sync.check_sync(Policy(), TwoRanks(), None, None, tolerance=0.05)


def test_relative_gap_compares_in_the_engines_dtype():
    trainer = torch.tensor([1.0, 0.5 + 2**-20])
    assert sync.relative_gap(trainer, trainer.bfloat16()) == 0.0
    assert sync.relative_gap(trainer, torch.tensor([1.0, 0.25])) == pytest.approx(0.25 + 2**-20)
    assert sync.relative_gap(trainer, torch.zeros(3)) == 1.0


def test_missing_tokens_are_a_gap():
    gap = sync.logprob_gap([-1.0], [-1.0, -2.0])
    assert gap != gap


def test_probe_tokens_fill_up_from_a_short_tokenizer():
    class Short:
        def encode(self, text, add_special_tokens):
            return [5, 6, 7]

    prompt_ids, completion_ids = sync.probe_tokens(Short())
    assert prompt_ids == [5, 6]
    assert completion_ids == [7, 5, 6, 7]


@pytest.mark.parametrize(
    ("gap", "low_precision", "passes"), [(0.3, True, True), (0.3, False, False), (0.6, True, False)]
)
def test_bfloat16_rounding_passes_where_every_weight_has_arrived(gap, low_precision, passes):
    policy = Policy(-1.0)
    score, weight_gap = engine(
        -1.0 - gap, {**policy.weights, "lm_head.weight": policy.weights["model.embed_tokens.weight"]}
    )
    check = lambda: sync.check_sync(policy, OneRank(), score, weight_gap, 0.05, low_precision=low_precision)  # noqa: E731
    if passes:
        assert check()["sync/logprob_gap_max"] == pytest.approx(gap)
    else:
        with pytest.raises(GuardStop, match="All weights are equal"):
            check()


def test_a_weight_that_did_not_arrive_never_passes_as_rounding():
    policy = Policy(-1.0)
    score, weight_gap = engine(-1.3, {**policy.weights, "model.norm.weight": torch.zeros(4, 4)})
    with pytest.raises(GuardStop, match=r"model\.norm\.weight"):
        sync.check_sync(policy, OneRank(), score, weight_gap, 0.05, low_precision=True)


def test_weights_of_which_none_could_be_read_are_not_called_equal():
    """As with an engine whose workers hold shards, or a server that was started by hand."""
    score, weight_gap = engine(-1.3, {})
    with pytest.raises(GuardStop, match="The engine's weights cannot be read from here"):
        sync.check_sync(Policy(), OneRank(), score, weight_gap, 0.05, low_precision=True)
