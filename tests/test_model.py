"""Logprobs of given tokens: the head, temperature, packing, absolute positions."""

from __future__ import annotations

import contextlib
import functools
import json
import math

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from grpo_cli.batch import pack
from grpo_cli.errors import ConfigError
from grpo_cli.model import network as model
from grpo_cli.model.network import HeadLogprobs, Scorer, load_causal_lm
from grpo_cli.process.ranks import Ranks
from grpo_cli.types import Completion, Group, Prompt
from tests import tiny

ALONE = Ranks(0, 1, 0, torch.device("cpu"))
PACKINGS = ("none", "sequence", "shared_prefix")
FAMILIES = ("llama", "llama-tied", "gpt2", "mistral", "gemma2", "qwen2")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {family: tiny.tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def answers(prompt: list[int], *completions: list[int]) -> Group:
    return Group(
        "1-0",
        Prompt("row", "", prompt, None),
        [Completion("", ids, "stop", unshaped=1.0, reward=1.0, advantage=1.0) for ids in completions],
        1,
        0,
    )


def score(scorer: nn.Module, groups: list[Group], *overrides: str) -> dict[tuple[int, int], list[float]]:
    """Logprobs by (group, completion), of all micro-batches."""
    found = {}
    with torch.no_grad():
        for micro in pack(groups, tiny.config(*overrides), ALONE).micro_batches:
            logprobs_T, _ = scorer(micro)
            for index, sequence in enumerate(micro.sequences):
                found[sequence.group, sequence.completion] = logprobs_T[micro.tokens.seq_T == index].tolist()
    return found


@functools.cache
def scorer_of(directory, attention: str = "sdpa", temperature: float = 1.0) -> Scorer:
    cfg = tiny.config(f"model.path={directory}", f"model.attn_implementation={attention}")
    return Scorer(load_causal_lm(cfg.model), temperature).eval()


@functools.cache
def plain_model(directory) -> nn.Module:
    return load_causal_lm(tiny.config(f"model.path={directory}", "model.attn_implementation=eager").model).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing_gives_the_logprobs_of_each_sequence_alone(models, family, attention, packing):
    # B07, B08: prompts of 1 to 20 tokens side by side; the model itself, one sequence at a time, is the judge.
    # The last three families slide a window of 16 tokens; the longest sequence has more than twice as many.
    groups = tiny.make_groups()
    assert max(len(g.prompt.token_ids + c.token_ids) for g in groups for c in g.completions) > 2 * tiny.WINDOW
    scorer = scorer_of(models[family], attention)
    found = score(scorer, groups, f"trainer.packing={packing}")
    plain = plain_model(models[family])
    for g, group in enumerate(groups):
        for i, completion in enumerate(group.completions):
            prompt, ids = group.prompt.token_ids, completion.token_ids
            with torch.no_grad():
                logits = plain(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
            assert found[g, i] == pytest.approx(expected.tolist(), abs=1e-5)


def test_changing_the_last_token_leaves_the_earlier_logprobs_alone(models):
    scorer = scorer_of(models["llama"])
    one, other = (score(scorer, [answers([1, 2], [3, last], [5])])[0, 0] for last in (4, 9))
    assert one[0] == pytest.approx(other[0], abs=1e-6)
    assert one[1] != pytest.approx(other[1], abs=1e-3)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_bigram_model_is_scored_from_its_table(packing):
    # B07: logits depend on the current token alone, so logprobs are rows of the table.
    table = torch.randn(tiny.VOCABULARY, tiny.VOCABULARY, generator=torch.Generator().manual_seed(0))
    scorer = Scorer(bigram(table), 1.0)
    found = score(scorer, [answers([1, 2], [3, 4], [5])], f"trainer.packing={packing}")
    logprobs = table.log_softmax(-1)
    assert found[0, 0] == pytest.approx([logprobs[2, 3].item(), logprobs[3, 4].item()], abs=1e-5)
    assert found[0, 1] == pytest.approx([logprobs[2, 5].item()], abs=1e-5)


class bigram(nn.Module):
    """A causal LM of transformers' shape whose hidden state is the one-hot current token."""

    base_model_prefix = "decoder"
    dtype = torch.float32

    class Decoder(nn.Module):
        def forward(self, input_ids, **_):
            class Output:
                last_hidden_state = nn.functional.one_hot(input_ids, tiny.VOCABULARY).float()

            return Output

    def __init__(self, table: torch.Tensor):
        super().__init__()

        self.config, self.decoder = PreTrainedConfig(attn_implementation="sdpa"), self.Decoder()
        self.head = nn.Linear(*table.shape, bias=False)
        self.head.weight.data = table.T.clone()

    def get_output_embeddings(self):
        return self.head


def test_temperature_divides_the_logits():
    # D03: logits [2, 0] at T = 0.5 are [4, 0]: log sigmoid(4) = -0.01815; untempered it would be -0.12693.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
    logprobs, entropy = HeadLogprobs.apply(hidden, weight, None, torch.tensor([0]), True, 1 / 0.5, None)
    assert logprobs.item() == pytest.approx(-0.01815, abs=1e-5)
    p = 1 / (1 + math.exp(-4))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 11 * 3, 2**20])
@pytest.mark.parametrize("with_bias", [False, True])
def test_head_equals_autograd_in_value_and_gradient(monkeypatch, softcap, chunk_bytes, with_bias):
    monkeypatch.setattr(model, "LOGIT_BYTES", chunk_bytes)
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11) if with_bias else None
    targets, scale = torch.randint(11, (7,)), 0.7
    inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    reference = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logprobs, entropy = HeadLogprobs.apply(*inputs, *([] if with_bias else [None]), targets, True, scale, softcap)
    logits = nn.functional.linear(reference[0], reference[1], reference[2] if with_bias else None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = (scale * logits).log_softmax(-1)
    expected, expected_entropy = full[torch.arange(7), targets], -(full.exp() * full).sum(-1)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    weights = torch.randn(7)
    (logprobs * weights + 0.3 * entropy).sum().backward()
    (expected * weights + 0.3 * expected_entropy).sum().backward()
    for mine, theirs in zip(inputs, reference, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_dropout_is_off_in_training_mode_too(models):
    # B14: GPT-2 comes with a dropout of 0.1 in three places; gradient checkpointing needs training mode.
    scorer = scorer_of(models["gpt2"])
    groups = tiny.make_groups()
    quiet = score(scorer, groups)
    assert score(scorer.train(), groups) == quiet


def test_a_saved_config_has_the_dropout_that_it_came_with(models):
    lm = load_causal_lm(tiny.config(f"model.path={models['gpt2']}").model)
    assert (lm.config.resid_pdrop, lm.transformer.drop.p) == (0.0, 0.0)
    saved = model.config_to_save(lm)
    assert (saved.resid_pdrop, saved.embd_pdrop, saved.attn_pdrop) == (0.1, 0.1, 0.1)
    assert lm.config.resid_pdrop == 0.0


def test_a_head_with_an_adapter_is_refused(models):
    pytest.importorskip("peft")
    lora = "model.lora={rank: 2, alpha: 4.0, dropout: 0.0, target_modules: [lm_head]}"
    cfg = tiny.config(f"model.path={models['llama']}", lora)
    with pytest.raises(ConfigError, match="output head"):
        Scorer(model.add_lora(load_causal_lm(cfg.model), cfg.model), 1.0)


def test_the_gradient_of_the_last_eos_is_not_zero(models):
    # B01: the EOS that ends a completion is trained though it equals the pad id.
    scorer = scorer_of(models["llama"])
    for packing in PACKINGS:
        (micro,) = pack(
            [answers([0, 5], [5, 7, 0], [5, 7, 8, 9, 6])], tiny.config(f"trainer.packing={packing}"), ALONE
        ).micro_batches
        logprobs_T, _ = scorer(micro)
        eos = micro.targets_T == 0
        assert eos.sum() == 1
        scorer.zero_grad()
        logprobs_T[eos].sum().backward()
        assert scorer.causal_lm.get_output_embeddings().weight.grad[0].abs().sum() > 0


def spoil_weights(folder, how: str) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    if how == "pickle under the name":
        torch.save(Touch(folder.parent / "sentinel"), file)
    elif how == "pickle alone":
        file.unlink()
        torch.save(Touch(folder.parent / "sentinel"), folder / "pytorch_model.bin")
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "lacks":
        del weights["model.norm.weight"]
        save_file(weights, file, metadata={"format": "pt"})
    elif how == "other shape":
        save_file(weights | {"model.norm.weight": torch.ones(7)}, file, metadata={"format": "pt"})


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


@pytest.mark.parametrize("how", ["pickle under the name", "pickle alone", "cut short", "lacks", "other shape"])
def test_weights_that_cannot_be_read_or_are_not_all_there_are_refused(tmp_path, how):
    """Case L02; and transformers would put random numbers in the place of a missing weight."""
    folder = tiny.tiny_model(tmp_path / "model")
    spoil_weights(folder, how)
    with pytest.raises(ConfigError, match="model_readable") as caught:
        load_causal_lm(tiny.config(f"model.path={folder}").model)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (how == "lacks") == ("lacks 1 of its weights, for example model.norm.weight" in str(caught.value))
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.parametrize("model_type", ["llama", "mine"])
def test_code_beside_the_weights_is_not_run(tmp_path, model_type):
    """Case L01, policy and reference alike: the plain class, or an error; the module is not imported."""
    folder = tiny.tiny_model(tmp_path / "model")
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'sentinel')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    asked = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": asked}))
    cfg = tiny.config(f"model.path={folder}").model
    with contextlib.nullcontext() if model_type == "llama" else pytest.raises(ConfigError, match="model_readable"):
        assert load_causal_lm(cfg).config.model_type == "llama"
    assert not (tmp_path / "sentinel").exists()
