"""Rollout `hf` on the tiny model: groups, seeds, EOS, stop strings, the sync check."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli.errors import GuardStop
from grpo_cli.model.builtin import locate
from grpo_cli.process.ranks import Ranks
from grpo_cli.process.signals import Interrupted
from grpo_cli.rollout import make_rollout
from grpo_cli.rollout.hf import HfRollout, stop_string_check, token_budget
from grpo_cli.rollout.sampling import Sampling
from grpo_cli.types import Prompt
from tests.configs import make_config

RANKS = Ranks(0, 1, 0, torch.device("cpu"))


@cache
def load_tiny():
    path = locate("builtin:tiny")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


class Policy:
    """A trainer reduced to what a rollout asks of it; `trained` are its own weights, `module` what generation sees."""

    def __init__(self):
        self.module, self.tokenizer = copy.deepcopy(load_tiny())
        self.device = torch.device("cpu")
        self.trained = self.module
        self.temperature = 1.0
        self.generating = False

    @contextmanager
    def generation(self):
        self.generating = True
        try:
            yield
        finally:
            self.generating = False

    def gathered_parameters(self):
        yield from self.trained.named_parameters()

    @torch.no_grad()
    def score(self, prompt_ids, completion_ids):
        ids = (prompt_ids + completion_ids)[:-1]
        logits = self.trained(torch.tensor([ids])).logits[0, len(prompt_ids) - 1 :]
        logprobs = (logits / self.temperature).log_softmax(-1)
        return logprobs.gather(1, torch.tensor(completion_ids)[:, None]).squeeze(1).tolist()


@pytest.fixture
def policy():
    return Policy()


def config(*overrides: str):
    return make_config("experiment=smoke", "rollout.num_generations=4", *overrides)


def prompts(policy, *texts: str) -> list[tuple[str, Prompt]]:
    rows = [Prompt(f"row-{i}", text, policy.tokenizer.encode(text), None) for i, text in enumerate(texts)]
    return [(f"1-{i}", prompt) for i, prompt in enumerate(rows)]


def test_groups_come_back_in_order_with_everything_set(policy):
    rollout = make_rollout(config(), policy, RANKS)
    assert isinstance(rollout, HfRollout)
    asked = prompts(policy, "What is 1 + 2?", "Hi", "What is 11 + 12?")
    groups = rollout.generate(asked, step=3, version=2)
    assert [group.group_id for group in groups] == ["1-0", "1-1", "1-2"]
    assert [group.prompt for group in groups] == [prompt for _, prompt in asked]
    eos = policy.tokenizer.eos_token_id
    for group in groups:
        assert (group.step, group.policy_version, group.dropped, len(group.completions)) == (3, 2, None, 4)
        for completion in group.completions:
            assert len(completion.sampler_logprobs) == len(completion.token_ids)
            assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == eos)
            assert completion.text == policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            expected = policy.score(group.prompt.token_ids, completion.token_ids)
            assert completion.sampler_logprobs == pytest.approx(expected, abs=1e-4)
    assert len({tuple(completion.token_ids) for completion in groups[0].completions}) == 4


def test_no_prompts_no_groups(policy):
    assert make_rollout(config(), policy, RANKS).generate([], step=1, version=0) == []


def test_tokens_are_the_same_whoever_generates_them(policy):
    """Rank r takes prompts[r::2]: together the two ranks sample what one rank would have."""
    asked = prompts(policy, "a", "bb b", "c c c c", "dd")
    one = make_rollout(config(), policy, RANKS).generate(asked, 1, 0)
    two = [make_rollout(config(), policy, RANKS).generate(asked[rank::2], 1, 0) for rank in range(2)]
    by_id = {group.group_id: group for share in two for group in share}
    for group in one:
        assert [c.token_ids for c in group.completions] == [c.token_ids for c in by_id[group.group_id].completions]


def test_another_seed_or_group_id_samples_other_tokens(policy):
    asked = prompts(policy, "a")
    renamed = [("2-0", asked[0][1])]
    first = make_rollout(config(), policy, RANKS).generate(asked, 1, 0)[0].completions
    others = [
        make_rollout(config("run.seed=1"), policy, RANKS).generate(asked, 1, 0)[0].completions,
        make_rollout(config(), policy, RANKS).generate(renamed, 1, 0)[0].completions,
    ]
    for other in others:
        assert [c.token_ids for c in other] != [c.token_ids for c in first]


def test_small_batches_sample_the_same_tokens(policy, monkeypatch):
    asked = prompts(policy, "a", "bb b", "c c c c")
    whole = make_rollout(config(), policy, RANKS).generate(asked, 1, 0)
    monkeypatch.setattr("grpo_cli.rollout.hf.token_budget", lambda module: 60)
    split = make_rollout(config(), policy, RANKS).generate(asked, 1, 0)
    assert [[c.token_ids for c in g.completions] for g in split] == [
        [c.token_ids for c in g.completions] for g in whole
    ]


def test_a_secondary_eos_is_a_stop(policy):
    """EOS ids of the generation config count beside the tokenizer's: no completion that ends in one is truncated."""
    own = policy.tokenizer.eos_token_id
    policy.module.generation_config.eos_token_id = list(range(5, 261, 2))
    rollout = make_rollout(config("rollout.max_new_tokens=64"), policy, RANKS)
    completions = [c for g in rollout.generate(prompts(policy, "a", "b c"), 1, 0) for c in g.completions]
    assert {c.finish_reason for c in completions} == {"stop"}
    for completion in completions:
        last = completion.token_ids[-1]
        assert last == own or last % 2 == 1
        assert completion.text == policy.tokenizer.decode(completion.token_ids[:-1], skip_special_tokens=True)


def test_stop_string_ends_the_text_before_it_and_the_ids_after_it(policy):
    asked = prompts(policy, "a")
    free = make_rollout(config(), policy, RANKS).generate(asked, 1, 0)[0].completions[0]
    position = next(t for t, token in enumerate(free.token_ids) if policy.tokenizer.decode([token]).isascii() and t > 1)
    stop = policy.tokenizer.decode([free.token_ids[position]])
    sampling = Sampling(n=1, max_new_tokens=16, temperature=1.0, stop=(stop, "never this text"))
    (group,) = make_rollout(config(), policy, RANKS).generate(asked, 1, 0, sampling)
    completion = group.completions[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
    assert stop in policy.tokenizer.decode(completion.token_ids)
    assert stop not in completion.text


def test_stop_string_check_finds_only_what_has_just_appeared(policy):
    check = stop_string_check(policy.tokenizer, ("ab", "é"))
    rows = [policy.tokenizer.encode(text) for text in ("xxxab", "xxa b", "xxx" + "é")]
    width = min(len(row) for row in rows)
    assert check(torch.tensor([row[-width:] for row in rows])).tolist() == [True, False, True]


def test_evaluation_can_be_greedy(policy):
    rollout = make_rollout(config(), policy, RANKS)
    sampling = Sampling(n=2, max_new_tokens=5, temperature=0.0)
    (group,) = rollout.generate(prompts(policy, "a"), 1, 0, sampling)
    assert group.completions[0].token_ids == group.completions[1].token_ids
    assert len(group.completions) == 2
    assert len(group.completions[0].token_ids) <= 5


def test_ids_are_kept_where_the_text_encodes_to_others(policy, monkeypatch):
    """encode(decode(ids)) may differ from ids; what is trained on is what was sampled."""
    monkeypatch.setattr(type(policy.tokenizer), "decode", lambda self, ids, **kwargs: "one token")
    (group,) = make_rollout(config(), policy, RANKS).generate(prompts(policy, "a"), 1, 0)
    completion = group.completions[0]
    assert completion.text == "one token"
    assert completion.token_ids != policy.tokenizer.encode("one token")
    assert completion.sampler_logprobs == pytest.approx(
        policy.score(group.prompt.token_ids, completion.token_ids), abs=1e-4
    )


def test_generation_happens_inside_the_policys_context(policy):
    inside: list[bool] = []
    policy.module.register_forward_pre_hook(lambda module, args: inside.append(policy.generating))
    make_rollout(config(), policy, RANKS).generate(prompts(policy, "a"), 1, 0)
    assert inside
    assert all(inside)


def test_a_module_in_training_mode_generates_the_same(policy):
    """Gradient checkpointing needs training mode, in which its layers would throw the cache away."""
    asked = prompts(policy, "a", "bb")
    plain = make_rollout(config(), policy, RANKS).generate(asked, 1, 0)
    policy.module.gradient_checkpointing_enable({"use_reentrant": False})
    policy.module.train()
    policy.module.lm_head.eval()
    rollout = make_rollout(config("rollout.sync_tolerance=1e-4"), policy, RANKS)
    trained = rollout.generate(asked, 1, 0)
    assert [[c.token_ids for c in g.completions] for g in trained] == [
        [c.token_ids for c in g.completions] for g in plain
    ]
    assert rollout.sync(policy, 1)["sync/logprob_gap_max"] < 1e-5
    assert policy.module.training  # as it was, module by module
    assert not policy.module.lm_head.training


def test_a_signal_ends_generation_between_two_tokens(policy, monkeypatch):
    passes: list[int] = []
    policy.module.register_forward_pre_hook(lambda module, args: passes.append(1))

    def check():
        if len(passes) == 3:
            raise Interrupted

    monkeypatch.setattr("grpo_cli.rollout.decode.stop.check", check)
    with pytest.raises(Interrupted):
        make_rollout(config(), policy, RANKS).generate(prompts(policy, "a"), 1, 0)
    assert len(passes) == 3
    assert not policy.generating  # the context was left


def test_sync_agrees_when_nothing_is_wrong(policy):
    policy.temperature = 0.6
    rollout = make_rollout(config("rollout.temperature=0.6"), policy, RANKS)
    metrics = rollout.sync(policy, 1)
    assert metrics["sync/logprob_gap_max"] < 1e-5
    assert metrics["time/weight_sync"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.norm.weight",
    ],
)
def test_a_sabotaged_sync_names_the_family(policy, name):
    """Generation sees a copy in which one tensor is stale."""
    policy.trained = copy.deepcopy(policy.module)
    with torch.no_grad():
        policy.trained.get_parameter(name).add_(0.3 * torch.randn(1))
        policy.trained.get_parameter(name).mul_(3.0)
    rollout = make_rollout(config("rollout.sync_tolerance=1e-4"), policy, RANKS)
    with pytest.raises(GuardStop) as stop:
        rollout.sync(policy, 1)
    message = str(stop.value)
    family = name.replace(".0.", ".*.").replace(".1.", ".*.")
    named = message.split("differ: ")[1]
    expected = {family, "lm_head.weight"} if "embed" in name else {family}  # tied: one tensor with two names
    assert {word for word in named.split() if word.endswith(".weight")} == expected


def test_one_pass_through_the_layers_serves_both_sides(policy):
    """What the two do apart is compared: here the temperature."""
    runs = []
    with policy.module.model.norm.register_forward_hook(lambda *_: runs.append(1)):
        make_rollout(config(), policy, RANKS).sync(policy, 1)
        assert len(runs) == 1
        policy.temperature = 0.5
        with pytest.raises(GuardStop, match="All weights are equal"):
            make_rollout(config(), policy, RANKS).sync(policy, 2)


def test_budget_counts_cache_and_logits(policy, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = token_budget(policy.module)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert token_budget(policy.module) == pytest.approx(alone / 4, rel=1e-3)
