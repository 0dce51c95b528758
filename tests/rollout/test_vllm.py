"""Rollout `vllm` with a real engine in this process: tokens, logprobs, seeds, weight sync and its check."""

from __future__ import annotations

import random
import signal

import pytest
import torch

from grpo_cli.errors import GuardStop
from grpo_cli.process.signals import Interrupted, stop
from grpo_cli.rollout import make_rollout, vllm
from grpo_cli.rollout.sampling import Sampling
from tests.rollout import engines

pytestmark = engines.real_engine

LONG = "Think about it step by step, and be sure to write down the number alone. " * 4 + "What is 2 + 3?"


@pytest.fixture(scope="module")
def trained():
    """The one engine of this module, and the policy that it samples from."""
    policy = engines.Policy(temperature=0.7)
    rollout = make_rollout(engines.config("rollout=vllm", "rollout.temperature=0.7"), policy, engines.RANKS)
    yield policy, rollout
    rollout.close()
    rollout.close()


@pytest.fixture
def engine(trained):
    """The engine, at the weights that it started with; the test may move them."""
    policy, rollout = trained
    weights = policy.weights()
    yield policy, rollout
    policy.restore(weights)
    rollout.sync(policy, 0)


def test_a_signal_ends_a_generation_and_waits_for_a_sync(engine, monkeypatch):
    """After the sync there is a state to save; in the middle of it the other ranks would wait for this one."""
    policy, rollout = engine
    with monkeypatch.context() as patch:
        patch.setattr(stop, "_signum", signal.SIGTERM)
        assert rollout.sync(policy, 1)["sync/logprob_gap_max"] < 1e-4
        with pytest.raises(Interrupted):
            rollout.generate(engines.prompts(policy, "Hi"), 1, 1)
    assert rollout.generate(engines.prompts(policy, "Hi"), 1, 1)


def test_groups_come_back_in_order_with_everything_set(engine):
    policy, rollout = engine
    asked = engines.prompts(policy, "What is 1 + 2?", "Hi", "What is 11 + 12?")
    groups = rollout.generate(asked, step=3, version=2)
    assert [(group.group_id, group.prompt) for group in groups] == asked
    eos = policy.tokenizer.eos_token_id
    for group in groups:
        assert (group.step, group.policy_version, group.dropped, len(group.completions)) == (3, 2, None, 4)
        for completion in group.completions:
            assert len(completion.sampler_logprobs) == len(completion.token_ids)
            assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == eos)
            assert completion.text == policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    # The temperature of 0.7 is in them: both sides divide by it.
    assert engines.largest_gap(policy, groups) < 1e-4
    assert rollout.generate([], step=3, version=2) == []


def test_tokens_depend_on_seed_group_and_index_alone(engine):
    policy, rollout = engine
    asked = engines.prompts(policy, "What is 1 + 2?", "Hi")
    together = rollout.generate(asked, step=1, version=0)
    alone = rollout.generate(asked[1:], step=1, version=0)
    tokens = [[completion.token_ids for completion in group.completions] for group in [*together, *alone]]
    assert tokens[1] == tokens[2]
    assert len({tuple(ids) for ids in tokens[0]}) == 4  # each completion draws for itself
    renamed = rollout.generate([("2-1", asked[1][1])], step=2, version=0)
    assert [completion.token_ids for completion in renamed[0].completions] != tokens[1]


def test_the_trainers_random_numbers_are_left_alone(engine):
    policy, rollout = engine
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)
    threads = torch.get_num_threads()
    rollout.generate(engines.prompts(policy, "Hi"), step=1, version=0)
    assert (torch.rand(1), random.random()) == expected
    torch.set_num_threads(threads)  # vLLM forbids it in its own process
    assert torch.get_num_threads() == threads


def test_eval_sampling_greedy_and_stop_strings(engine):
    policy, rollout = engine
    asked = engines.prompts(policy, "What is 1 + 2?")
    greedy = Sampling(n=2, max_new_tokens=8, temperature=0.0)
    one, two = rollout.generate(asked, 1, 0, greedy)[0].completions
    assert one.token_ids == two.token_ids
    assert one.finish_reason == "length"
    assert len(one.token_ids) == 8
    # The third character of the greedy answer as a stop string: the text ends before it, the ids hold it.
    wanted = policy.tokenizer.decode(one.token_ids)[2]
    cut = rollout.generate(asked, 1, 0, Sampling(n=1, max_new_tokens=8, temperature=0.0, stop=(wanted,)))
    completion = cut[0].completions[0]
    assert completion.finish_reason == "stop"
    assert wanted not in completion.text
    assert completion.token_ids == one.token_ids[: len(completion.token_ids)]
    assert len(completion.sampler_logprobs) == len(completion.token_ids) <= 3


def test_any_of_several_eos_ids_ends_a_completion(engine, monkeypatch):
    policy, rollout = engine
    asked = engines.prompts(policy, "What is 1 + 2?")
    greedy = Sampling(n=1, max_new_tokens=8, temperature=0.0)
    third = rollout.generate(asked, 1, 0, greedy)[0].completions[0].token_ids[2]
    monkeypatch.setattr(rollout, "_eos_ids", frozenset({policy.tokenizer.eos_token_id, third}))
    completion = rollout.generate(asked, 1, 0, greedy)[0].completions[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == third  # kept: it is a trained token
    assert len(completion.sampler_logprobs) == len(completion.token_ids)


def test_sync_brings_new_weights_and_forgets_the_prefix_cache(engine):
    policy, rollout = engine
    asked = engines.prompts(policy, LONG)
    assert len(asked[0][1].token_ids) > 2 * 128  # blocks of the cache, filled before the weights change
    rollout.generate(asked, step=1, version=0)
    policy.move(0.05)
    assert engines.largest_gap(policy, rollout.generate(asked, step=1, version=0)) > 0.01  # the old weights
    metrics = rollout.sync(policy, 1)
    assert metrics["sync/logprob_gap_max"] < 1e-4
    assert metrics["time/weight_sync"] > 0
    assert engines.largest_gap(policy, rollout.generate(asked, step=2, version=1)) < 1e-4


@pytest.mark.parametrize(
    ("part", "family"),
    [
        ("q_proj", "model.layers.*.self_attn.q_proj.weight"),
        ("k_proj", "model.layers.*.self_attn.k_proj.weight"),
        ("v_proj", "model.layers.*.self_attn.v_proj.weight"),
        ("o_proj", "model.layers.*.self_attn.o_proj.weight"),
        ("gate_proj", "model.layers.*.mlp.gate_proj.weight"),
        ("up_proj", "model.layers.*.mlp.up_proj.weight"),
        ("down_proj", "model.layers.*.mlp.down_proj.weight"),
        ("input_layernorm", "model.layers.*.input_layernorm.weight"),
        ("post_attention_layernorm", "model.layers.*.post_attention_layernorm.weight"),
        ("model.norm", "model.norm.weight"),
    ],
)
def test_a_family_that_did_not_arrive_is_named(engine, monkeypatch, part, family):
    policy, rollout = engine
    monkeypatch.setattr(
        vllm, "named_copies", lambda policy: ((n, t * 1.5 if part in n else t) for n, t in policy.gathered_parameters())
    )
    with pytest.raises(GuardStop) as stop:
        rollout.sync(policy, 1)
    assert named_families(stop) == [family]


def test_a_stale_embedding_is_named_with_its_tied_head(engine, monkeypatch):
    policy, rollout = engine
    stale = policy.weights()
    policy.move(0.5, only="embed_tokens")
    monkeypatch.setattr(vllm, "named_copies", lambda policy: iter(stale.items()))
    with pytest.raises(GuardStop) as stop:
        rollout.sync(policy, 1)
    assert sorted(named_families(stop)) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_a_stale_packed_copy_of_the_tied_head_is_named(engine, monkeypatch):
    policy, rollout = engine
    policy.move(0.5, only="embed_tokens")
    rpc = rollout._llm.collective_rpc
    monkeypatch.setattr(
        rollout._llm, "collective_rpc", lambda name, **kw: None if name == "grpo_finish_load" else rpc(name, **kw)
    )
    with pytest.raises(GuardStop) as stop:
        rollout.sync(policy, 1)
    assert named_families(stop) == ["lm_head.weight"]


def test_preemptions_are_counted(engine):
    assert engine[1].metrics() == {"rollout/vllm_preemptions_total": 0.0}


def named_families(stop) -> list[str]:
    listed = str(stop.value).partition("Weights that differ: ")[2].partition(". The engine")[0]
    return [entry.split(" (by ")[0] for entry in listed.split(", ")]


def test_more_prompt_tokens_than_fit_into_one_pass(engine):
    """On CPUs vLLM cannot cut the prompt of a seeded request into pieces; 16 of 320 tokens are more than it takes."""
    policy, rollout = engine
    asked = engines.prompts(policy, *(f"{index:02d} {LONG}" for index in range(16)))
    assert sum(len(prompt.token_ids) for _, prompt in asked) > 2 * 2048
    groups = rollout.generate(asked, 1, 0, Sampling(n=1, max_new_tokens=4, temperature=0.7))
    assert engines.largest_gap(policy, groups) < 1e-4
