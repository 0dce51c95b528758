"""The token loop against transformers' own `generate` and against a plain scoring forward."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from grpo_cli.rollout.decode import Decoded, Row, decode, layers_once, plan_batches, score
from grpo_cli.rollout.hf import uniforms
from grpo_cli.rollout.sampling import Sampling

VOCAB = 64
PROMPTS = [[5, 7, 11], [9], [3, 1, 4, 1, 5, 9, 2, 6], [8, 0, 0, 8]]  # 0 is the pad id and stands in a prompt
NO_EOS: frozenset[int] = frozenset()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.3,  # logits far enough apart that rounding does not decide the greedy token
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def gpt2():
    """Absolute positions: a wrong position id shows."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module", params=[llama, gpt2], ids=["llama", "gpt2"])
def model(request):
    return request.param()


def every_row(samples: int) -> list[Row]:
    return [Row(prompt, index) for prompt in range(len(PROMPTS)) for index in range(samples)]


def sampled(model, rows, eos_ids=NO_EOS, length=12, prompts=PROMPTS, stop_check=None, **changed) -> list[Decoded]:
    """Completions whose random numbers depend on (prompt, index) alone."""
    numbers = uniforms([100 * row.prompt + row.index for row in rows], length)
    sampling = Sampling(**{"n": 4, "max_new_tokens": length, "temperature": 1.0, **changed})
    return decode(model, prompts, rows, numbers, sampling, eos_ids, stop_check)


def scored(model, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1).tolist()


@pytest.mark.parametrize("eos", [[], [17], [17, 23, 40, 5]])
def test_greedy_equals_generate(model, eos):
    greedy = Sampling(n=1, max_new_tokens=12, temperature=0.0)
    ours = decode(model, PROMPTS, every_row(1), None, greedy, frozenset(eos))
    for prompt, row in zip(PROMPTS, ours, strict=True):
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=eos or None,
            pad_token_id=0,
        )
        assert row.token_ids == output[0, len(prompt) :].tolist()
        assert row.stopped == (row.token_ids[-1] in eos)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_scoring_forward(model, temperature):
    rows = every_row(3)
    for row, done in zip(rows, sampled(model, rows, temperature=temperature), strict=True):
        expected = scored(model, PROMPTS[row.prompt], done.token_ids, temperature)
        assert done.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(done.token_ids) == 12


def test_tokens_do_not_depend_on_the_batch(model):
    """Alone without padding, together with longer prompts, in another order: the same tokens and logprobs."""
    rows = every_row(4)
    together = dict(zip(rows, sampled(model, rows, eos_ids=frozenset({3, 9})), strict=True))
    backwards = dict(zip(rows[::-1], sampled(model, rows[::-1], eos_ids=frozenset({3, 9})), strict=True))
    for row in rows:
        numbers = uniforms([100 * row.prompt + row.index], 12)
        sampling = Sampling(n=4, max_new_tokens=12, temperature=1.0)
        (alone,) = decode(model, [PROMPTS[row.prompt]], [Row(0, row.index)], numbers, sampling, frozenset({3, 9}))
        for other in (together[row], backwards[row]):
            assert other.token_ids == alone.token_ids
            assert other.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


TEMPLATED = [[9, 9, 8, 7, 6, *rest] for rest in ([5], [5, 4, 3], [1, 2], [5, 4, 3])]


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [(TEMPLATED, 5), (PROMPTS, 0), ([[4, 5, 6], [4, 5, 6]], 2), ([[4, 5], [4, 5, 6, 7]], 1), ([[4], [4, 5]], 0)],
)
def test_what_all_prompts_begin_with_is_run_once(model, prompts, shared):
    seen: list[tuple[int, int]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rows = [Row(prompt, index) for prompt in range(len(prompts)) for index in range(3)]
    done = sampled(model, rows, prompts=prompts)
    handle.remove()
    longest = max(map(len, prompts))
    first = [(1, shared)] if shared else []
    assert seen[: len(first) + 1] == [*first, (len(prompts), longest - shared)]
    for row, result in zip(rows, done, strict=True):
        assert result.logprobs == pytest.approx(scored(model, prompts[row.prompt], result.token_ids), abs=1e-4)


def test_windowed_layers_share_nothing_and_are_right():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=4,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    windowed = MistralForCausalLM(config).eval()
    rows = [Row(prompt, index) for prompt in range(len(TEMPLATED)) for index in range(3)]
    for row, result in zip(rows, sampled(windowed, rows, prompts=TEMPLATED), strict=True):
        assert result.logprobs == pytest.approx(scored(windowed, TEMPLATED[row.prompt], result.token_ids), abs=1e-4)


def test_any_eos_ends_and_is_kept():
    model = llama()
    eos_ids = frozenset(range(0, VOCAB, 8))
    done = sampled(model, every_row(8), eos_ids=eos_ids, length=20)
    assert len({row.token_ids[-1] for row in done if row.stopped}) > 2  # several of the eight ended a row
    for row in done:
        assert len(row.logprobs) == len(row.token_ids)
        assert not eos_ids.intersection(row.token_ids[:-1])
        assert row.stopped == (row.token_ids[-1] in eos_ids)
        assert row.stopped or len(row.token_ids) == 20


def test_eos_as_the_very_last_token_counts_as_a_stop():
    model = llama()
    free = sampled(model, [Row(0, 0)], length=3)[0]
    ended = sampled(model, [Row(0, 0)], length=3, eos_ids=frozenset({free.token_ids[2]} - set(free.token_ids[:2])))[0]
    assert ended.token_ids == free.token_ids
    assert ended.stopped
    assert not free.stopped


def test_finished_rows_leave_the_batch_and_prompts_are_run_once():
    model = llama()
    seen: list[tuple[int, int]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    done = sampled(model, every_row(8), eos_ids=frozenset(range(0, VOCAB, 8)), length=20)
    handle.remove()
    lengths = [len(row.token_ids) for row in done]
    assert seen[0] == (len(PROMPTS), 8)
    # Token t + 1 needs a forward for exactly those rows that go on after token t.
    going_on = [sum(length > t for length in lengths) for t in range(1, max(lengths))]
    assert seen[1:] == [(count, 1) for count in going_on]


def test_stop_check_sees_what_was_generated():
    model = llama()
    free = sampled(model, [Row(0, 0)])[0].token_ids
    asked: list[list[int]] = []

    def stop_check(tokens):
        asked.extend(tokens.tolist())
        return torch.tensor([tokens.shape[1] == 5])

    (done,) = sampled(model, [Row(0, 0)], stop_check=stop_check)
    assert asked == [free[: t + 1] for t in range(5)]
    assert done.token_ids == free[:5]
    assert done.stopped


def test_layers_run_once_for_the_same_tokens_and_tensors(model):
    """Never for others: a tensor that is not the same one is a second pass, and shows."""
    runs = []
    last = [module for name, module in model.named_modules() if "norm" in name or "ln_" in name][-1]
    watch = last.register_forward_hook(lambda *_: runs.append(1))
    plain = score(model, [5, 7], [11, 3], 1.0)
    parameter = next(
        p for name, p in model.named_parameters() if name.endswith((".1.mlp.up_proj.weight", "1.mlp.c_fc.weight"))
    )
    trained = parameter.data
    try:
        runs.clear()
        with layers_once(model):
            assert score(model, [5, 7], [11, 3], 1.0) == plain
            assert score(model, [5, 7], [11, 3], 1.0) == plain
            assert len(runs) == 1
            assert score(model, [5, 7], [12, 3], 1.0) != plain
            parameter.data = trained * 2
            assert score(model, [5, 7], [11, 3], 1.0) != plain
            assert len(runs) == 3
            parameter.data = trained
        runs.clear()
        assert score(model, [5, 7], [11, 3], 1.0) == plain
        assert len(runs) == 1
    finally:
        parameter.data = trained
        watch.remove()


def test_batches_hold_all_rows_once_within_the_budget():
    lengths, samples, new = [10, 50, 10, 30, 100], 4, 10
    batches = plan_batches(lengths, samples, new, budget_tokens=240)
    rows = [row for batch in batches for row in batch]
    assert sorted((row.prompt, row.index) for row in rows) == [(p, i) for p in range(5) for i in range(4)]
    for batch in batches:
        assert len(batch) * (max(lengths[row.prompt] for row in batch) + new) <= 240
    # Both short prompts together (8 rows of 20), each of the others alone, the longest one (4 rows of 110) in two.
    assert [sorted({row.prompt for row in batch}) for batch in batches] == [[0, 2], [3], [1], [4], [4]]


def test_a_row_over_the_budget_still_runs_alone():
    assert plan_batches([100], 2, 10, budget_tokens=1) == [[Row(0, 0)], [Row(0, 1)]]
