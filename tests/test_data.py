"""Data: every reader, every bad row with its line, prompts templated once, and the cursor."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_cli import schema
from grpo_cli.compose import compose
from grpo_cli.data import inspect, load_data
from grpo_cli.data.arithmetic import ArithmeticRows
from grpo_cli.data.columns import Columns
from grpo_cli.data.encode import Encoder
from grpo_cli.data.hf import check_plain, parse_name
from grpo_cli.data.jsonl import JsonlRows, decode_object
from grpo_cli.data.rows import Row
from grpo_cli.errors import ConfigError
from grpo_cli.model.builtin import locate, tiny_tokenizer

BASE = compose(["model=tiny", "data=arithmetic", "trainer.prompts_per_step=1"]).config
JSONL = compose(["model=tiny", "data=jsonl", "data.train=x", "trainer.prompts_per_step=1", "reward=exact"]).config


def config(base=BASE, **changes) -> schema.Config:
    """The typed config with changes such as data__train=…; `__` stands for the dot."""
    resolved = json.loads(json.dumps(base))
    for key, value in changes.items():
        *path, last = key.split("__")
        section = resolved
        for part in path:
            section = section[part]
        section[last] = value
    return schema.parse(resolved)


def jsonl(tmp_path: Path, *lines: str | bytes | dict, name: str = "d.jsonl") -> str:
    path = tmp_path / name
    raw = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in raw) + b"\n")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def bos_tokenizer(template: str | None = None):
    """The byte tokenizer with a BOS (the id of its system role) that it puts before every text by itself."""
    from tokenizers.processors import TemplateProcessing

    made = tiny_tokenizer()
    made.bos_token = "<|system|>"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", made.bos_token_id)]
    )
    made.chat_template = template
    return made


def findings(cfg, tokenizer=None) -> dict[str, str]:
    return {finding.rule: finding.message for finding in inspect(cfg, tokenizer)}


# ---------------------------------------------------------------- arithmetic


def test_arithmetic_held_out_problems_are_in_no_training_row():
    cfg = config(data__train_size=300, data__eval_size=100).data  # 20 x 20 ordered pairs: all of them
    train, held_out = ArithmeticRows(cfg, "train"), ArithmeticRows(cfg, "eval")
    pairs = {(row.columns["a"], row.columns["b"]) for row in train.scan()}
    others = {(row.columns["a"], row.columns["b"]) for row in held_out.scan()}
    assert pairs | others == set(itertools.product(range(1, 21), repeat=2))
    assert len(pairs) == 300
    assert len(others) == 100
    row = train.row(5)
    a, b = row.columns["a"], row.columns["b"]
    assert row.prompt == f"What is {a} + {b}? Answer with just the number."
    assert row.answer == str(a + b)


def test_arithmetic_problems_do_not_depend_on_the_seed(tokenizer):
    first, second = (load_data(config(run__seed=seed), tokenizer) for seed in (0, 1))
    assert [p.text for p in first.eval_prompts(None)] == [p.text for p in second.eval_prompts(None)]
    assert {p.text for p in first.next(300)} == {p.text for p in second.next(300)}


@pytest.mark.parametrize(
    ("train", "held_out", "low", "high", "mended"),
    [
        (301, 100, 1, 20, 21),  # 401 rows, 20 x 20 = 400 problems; 21 x 21 = 441
        (300, 100, 1, 20, None),
        (3, 1, 5, 5, 6),
        (3, 1, 5, 4, 6),
        (1, 0, 5, 5, None),
        (1, 0, 0, 10**10, 10**6),
    ],
)
def test_arithmetic_range_must_hold_the_rows(train, held_out, low, high, mended):
    changes = {
        "data__train_size": train,
        "data__eval_size": held_out,
        "data__min_operand": low,
        "data__max_operand": high,
    }
    found = inspect(config(**changes), None)
    assert [(f.rule, f.fix) for f in found] == (
        [] if mended is None else [("counts_in_range", f"data.max_operand={mended}")]
    )
    if mended is not None:
        assert inspect(config(**changes | {"data__max_operand": mended}), None) == []


def test_arithmetic_of_a_huge_range_is_quick():
    cfg = config(data__min_operand=-(10**9), data__max_operand=10**9).data
    assert len(list(ArithmeticRows(cfg, "train").scan())) == 300


# ---------------------------------------------------------------- jsonl: what is accepted


def test_g01_odd_but_good_files_are_read(tmp_path, tokenizer):
    lines = [json.dumps({"prompt": f"p{i}", "answer": str(i)}) for i in range(2000)]
    lines[1232] = '{"prompt": "p", "answer": 42}'
    lines[6] = '{"prompt": "zero", "answer": 0}'
    lines[7] = '{"prompt": "as written", "answer": 3.10}'
    lines[8] = '{"prompt": 12, "answer": -1e3}'
    lines[9] = '{"prompt": 3.10, "answer": 1}'
    lines.insert(20, "   ")
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())  # a BOM, CRLF, no newline at the end
    cfg = config(JSONL, data__train=str(path), data__shuffle=False, trainer__epochs=1, trainer__steps=None)
    assert inspect(cfg, tokenizer) == []
    data = load_data(cfg, tokenizer)
    prompts = data.next(3000)
    assert len(prompts) == data.train_rows == 2000
    assert [prompt.answer for prompt in prompts[5:10]] == ["5", "0", "3.10", "-1e3", "1"]
    assert prompts[1232].answer == "42"
    assert prompts[1232].prompt_id == "row-1232"
    assert prompts[1232].source == f"{path}:1234"  # one blank line before it
    assert [prompts[index].text for index in (8, 9)] == ["<|user|>12<|assistant|>", "<|user|>3.10<|assistant|>"]


def test_g05_a_chat_list_is_accepted_like_a_string(tmp_path, tokenizer):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    prefilled = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "It is"}]
    path = jsonl(tmp_path, {"prompt": chat, "answer": "1"}, {"prompt": prefilled, "answer": "1"})
    cfg = config(JSONL, data__train=path, data__shuffle=False, data__system_prompt="ours")
    first, second = load_data(cfg, tokenizer).next(2)
    assert first.text == "<|system|>S<|user|>U<|assistant|>"  # a row's own system message stays
    assert second.text == "<|system|>ours<|user|>U<|assistant|>It is"
    assert first.row["prompt"] == chat


# ---------------------------------------------------------------- jsonl: what is refused, and how


def test_g01_all_bad_lines_are_listed_with_their_numbers(tmp_path):
    good = {"prompt": "p", "answer": "1"}
    path = jsonl(
        tmp_path,
        good,
        '{"prompt": "p", "answer":',
        "[]",
        '{"prompt": "p", "answer": "1",}',
        {"prompt": "p", "answer": True},
        {"prompt": {"text": "p"}, "answer": "1"},
        {"prompt": "p", "answer": ["1"]},
        '{"prompt": "p", "answer": NaN}',
        '{"prompt": "p", "prompt": "q", "answer": "1"}',
        '{"prompt": "\\ud800", "answer": "1"}',
        b'{"prompt": "\xff", "answer": "1"}',
        '"text"',
        "[" * 100_000,
        '{"prompt": "p", "answer": ' + "1" * 5000 + "}",
        good,
    )
    found = findings(config(JSONL, data__train=path))
    assert list(found) == ["data_rows_valid"]
    message = found["data_rows_valid"]
    assert message.startswith("13 rows of data.train cannot be read: ")
    for line in range(2, 15):
        assert f"{path}:{line}: " in message
    assert "the key 'prompt' stands twice" in message
    assert "lone surrogate (U+D800)" in message
    assert "answer is true" in message
    assert f"{path}:15" not in message


def test_the_first_twenty_bad_lines_are_named_and_all_are_counted(tmp_path):
    path = jsonl(tmp_path, *["oops"] * 50)
    (finding,) = inspect(config(JSONL, data__train=path), None)
    assert finding.message.count(path) == 20
    assert finding.message.startswith("50 rows of data.train")
    assert finding.message.endswith("; and 30 more")


def test_g05_a_missing_column_names_what_is_there(tmp_path):
    path = jsonl(tmp_path, {"question": "p", "answer": "1"}, {"question": "p", "answer": "1"})
    (finding,) = inspect(config(JSONL, data__train=path, data__prompt_key="questions"), None)
    assert finding.rule == "data_has_keys"
    assert finding.keys[0] == "data.prompt_key"
    assert f"{path}:1: no column questions (data.prompt_key); there are question, answer" in finding.message
    assert "the nearest is question" in finding.message


def test_g05_one_missing_and_one_null_answer(tmp_path):
    rows = [{"prompt": "p", "answer": "1"} for _ in range(8)]
    del rows[6]["answer"]
    rows[3]["answer"] = None
    path = jsonl(tmp_path, *rows)
    message = findings(config(JSONL, data__train=path))["data_has_keys"]
    assert message.startswith("2 rows")
    assert f"{path}:4: answer (data.answer_key) is null" in message
    assert f"{path}:7: no column answer" in message
    assert findings(config(JSONL, data__train=path, data__answer_key=None)) == {}


def test_g10_a_misspelt_answer_key_is_not_an_empty_answer(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p", "answer": "1"})
    message = findings(config(JSONL, data__train=path, data__answer_key="anwser"))["data_has_keys"]
    assert "the nearest is answer" in message


@pytest.mark.parametrize("prompt", ["", "   ", "\n", None, [], [{"role": "user", "content": " "}]])
def test_g06_blank_prompts_are_refused_although_a_template_would_add_tokens(tmp_path, tokenizer, prompt):
    path = jsonl(tmp_path, {"prompt": "p", "answer": "1"}, {"prompt": prompt, "answer": "1"})
    (finding,) = inspect(config(JSONL, data__train=path), tokenizer)
    assert finding.rule == ("data_has_keys" if prompt is None else "prompts_not_empty")
    assert f"{path}:2: " in finding.message


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}!"])
def test_g06_a_prompt_that_tokenises_to_nothing_is_refused(tmp_path, template):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE({"<s>": 0, "a": 1, "!": 2}, []))  # no unknown token: other letters vanish
    made = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="<s>")
    path = jsonl(tmp_path, {"prompt": "a", "answer": "1"}, {"prompt": "zzz", "answer": "1"})
    message = findings(config(JSONL, data__train=path, data__chat_template=template), made)["prompts_not_empty"]
    assert message.startswith("1 row ")
    assert f"{path}:2: the prompt tokenises to nothing" in message


def test_a_prompt_that_the_tokenizer_refuses_is_named(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "known": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>")
    path = jsonl(tmp_path, {"prompt": "known", "answer": "1"}, {"prompt": "strange", "answer": "1"})
    message = findings(config(JSONL, data__train=path), made)["data_rows_valid"]
    assert message.startswith("1 row ")
    assert f"{path}:2: the tokenizer refuses it" in message


def test_unescaped_latex_is_an_error_and_a_line_break_a_warning(tmp_path):
    path = jsonl(
        tmp_path,
        r'{"prompt": "p", "answer": "\frac{1}{2}"}',  # form feed + rac
        r'{"prompt": "\boxed", "answer": "1"}',  # backspace + oxed
        r'{"prompt": "p", "answer": "3 \text{cm}"}',  # tab + ext
        r'{"prompt": "tabs\tare fine\n", "answer": "1"}',
    )
    found = {f.rule: f for f in inspect(config(JSONL, data__train=path), None)}
    control, lines = found["text_free_of_control_characters"], found["answers_on_one_line"]
    assert (control.severity, lines.severity) == ("error", "warning")
    assert control.message.startswith("2 rows")
    assert f"{path}:1: the answer" in control.message
    assert f"{path}:2: the prompt" in control.message
    assert lines.message.startswith("1 row ")
    assert f"{path}:3" in lines.message


def test_h10_an_empty_answer_counts_only_where_a_term_reads_it(tmp_path):
    path = jsonl(tmp_path, {"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": " "})
    message = findings(config(JSONL, data__train=path))["gold_answers_present"]
    assert f"{path}:2" in message
    terms = [{"name": "regex", "weight": 1.0, "pattern": "x"}]
    assert findings(config(JSONL, data__train=path, reward__terms=terms)) == {}


def test_files_that_cannot_be_opened(tmp_path):
    good = jsonl(tmp_path, {"prompt": "p", "answer": "1"})
    found = inspect(config(JSONL, data__train=str(tmp_path / "no.jsonl"), data__eval=str(tmp_path)), None)
    assert [(f.rule, f.keys) for f in found] == [
        ("data_file_readable", ("data.train",)),
        ("data_file_readable", ("data.eval",)),
    ]
    assert findings(config(JSONL, data__train=good, data__eval=None)) == {}


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_a_file_without_rows_covers_no_step(tmp_path, lines):
    (finding,) = inspect(config(JSONL, data__train=jsonl(tmp_path, *lines)), None)
    assert finding.rule == "data_covers_one_step"
    assert "0 usable prompts" in finding.message


def test_fewer_rows_than_a_step_needs(tmp_path):
    path = jsonl(tmp_path, *[{"prompt": "p", "answer": "1"}] * 3)
    (finding,) = inspect(config(JSONL, data__train=path, trainer__prompts_per_step=4), None)
    assert finding.rule == "data_covers_one_step"
    assert finding.fix == "trainer.prompts_per_step=3"
    changes = {"trainer__prompts_per_step": 4, "rollout__num_generations": 4, "trainer__updates_per_step": 16}
    (finding,) = inspect(config(JSONL, data__train=path, **changes), None)
    assert finding.fix == "trainer.prompts_per_step=3 trainer.updates_per_step=12"  # of 12 sequences


def test_held_out_prompts_that_are_trained_on_are_a_warning(tmp_path):
    train = jsonl(tmp_path, {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "1"})
    held_out = jsonl(tmp_path, {"prompt": "c", "answer": "1"}, {"prompt": "b", "answer": "1"}, name="e.jsonl")
    (finding,) = inspect(config(JSONL, data__train=train, data__eval=held_out), None)
    assert (finding.rule, finding.severity) == ("eval_rows_not_in_train", "warning")
    assert f"{held_out}:2: the same prompt as {train}:2" in finding.message


def test_load_data_raises_every_error_at_once(tmp_path, tokenizer):
    path = jsonl(tmp_path, "{", {"prompt": "", "answer": "1"}, {"prompt": "x" * 300, "answer": "1"})
    with pytest.raises(ConfigError) as caught:
        load_data(config(JSONL, data__train=path), tokenizer)
    assert [f.rule for f in caught.value.findings] == ["data_rows_valid", "prompts_not_empty", "prompts_fit"]


def test_a_template_that_refuses_some_rows_names_them(tmp_path, tokenizer):
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ messages[0].content }}"
    )
    rows = [{"prompt": [{"role": role, "content": "c"}], "answer": "1"} for role in ("user", "tool", "user")]
    path = jsonl(tmp_path, *rows)
    message = findings(config(JSONL, data__train=path, data__chat_template=template), tokenizer)["data_rows_valid"]
    assert message.startswith("1 row ")
    assert f"{path}:2: the chat template refuses it: user first" in message


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize("template", [None, "<|user|>{{ messages[0].content | trim | upper }}<|assistant|>"])
@pytest.mark.parametrize("letter", ["x", "é"])  # with and without the shortcut for ASCII
def test_g07_length_is_measured_after_templating(tmp_path, tokenizer, template, letter):
    """Two role tokens around the bytes of the text: 29, 30 and 31 bytes make 31, 32 and 33 tokens."""
    texts = [letter * (n // len(letter.encode())) + "x" * (n % len(letter.encode())) for n in (29, 30, 31)]
    path = jsonl(tmp_path, *[{"prompt": text, "answer": "1"} for text in texts])
    changes = {"data__train": path, "data__chat_template": template, "data__max_prompt_tokens": 32}
    (finding,) = inspect(config(JSONL, **changes), tokenizer)
    assert finding.rule == "prompts_fit"
    assert finding.message.startswith("1 row of data.train have more than data.max_prompt_tokens=32 tokens")
    assert f"{path}:3: 33 tokens" in finding.message
    assert finding.fix == "data.max_prompt_tokens=33, or data.on_long_prompt=drop"

    data = load_data(config(JSONL, **changes, data__on_long_prompt="drop"), tokenizer)
    assert data.train_rows == 2
    assert {prompt.prompt_id for prompt in data.next(4)} == {"row-0", "row-1"}
    (note,) = data.notes
    assert note.startswith("data.on_long_prompt=drop: 1 of 3 prompts of data.train")


def test_g07_the_fix_raises_what_must_rise_with_it(tmp_path, tokenizer):
    path = jsonl(tmp_path, *[{"prompt": text, "answer": "1"} for text in ("x" * 100, "x")])
    changes = {"data__train": path, "data__max_prompt_tokens": 10, "rollout__max_new_tokens": 20}
    (finding,) = inspect(config(JSONL, **changes, trainer__micro_batch_tokens=64, rollout__max_model_len=40), tokenizer)
    assert finding.fix == (
        "data.max_prompt_tokens=102 trainer.micro_batch_tokens=122 rollout.max_model_len=122, "
        "or data.on_long_prompt=drop"
    )


@pytest.mark.parametrize(
    ("lengths", "fix"),
    [
        ((5000, 1, 1), "data.on_long_prompt=drop"),
        ((5000, 5000, 1), "data.on_long_prompt=drop trainer.prompts_per_step=1 trainer.updates_per_step=4"),
        ((5000, 5000, 5000), "Remove or shorten the rows in the message."),
        ((3900, 1, 1), "data.on_long_prompt=drop"),  # and 300 tokens of completion
        ((3700, 3700, 3700), "data.max_prompt_tokens=3702 trainer.micro_batch_tokens=4002"),
    ],
)
def test_g07_a_fix_keeps_within_the_positions_and_leaves_a_step(tmp_path, tokenizer, lengths, fix):
    """The tiny model has 4096 positions; a step takes two prompts of four completions, in eight updates."""
    locate("builtin:tiny")
    changes = {"trainer__prompts_per_step": 2, "rollout__num_generations": 4, "trainer__updates_per_step": 8}
    path = jsonl(tmp_path, *[{"prompt": "x" * length, "answer": "1"} for length in lengths])
    cfg = config(JSONL, data__train=path, rollout__max_new_tokens=300, trainer__micro_batch_tokens=600, **changes)
    (finding,) = inspect(cfg, tokenizer)
    assert (finding.rule, finding.fix) == ("prompts_fit", fix)


def test_g10_dropping_every_row_is_an_error(tokenizer):
    (finding,) = inspect(config(data__on_long_prompt="drop", data__max_prompt_tokens=1), tokenizer)
    assert finding.rule == "data_covers_one_step"
    assert "No row is left" in finding.message
    assert finding.keys[0] == "data.max_prompt_tokens"


TEMPLATES = {
    "plain": "<|user|>{{ messages[0].content }}<|assistant|>",
    "stripped": "A{{ messages[0]['content'] | trim }}B",
    "twice": "{{ messages[0].content }}<|user|>{{ messages[0].content }}",
    "json": "<|user|>{{ messages[0].content | tojson }}",
    "escaped": "<|user|>{{ messages[0].content | e }}",
    "needle": "{% if '/think' in messages[0].content %}{{ 'x' * 50 }}{% endif %}{{ messages[0].content }}",
    "stripped needle": "{% if '/think' in (messages[0].content | trim) %}{{ 'x' * 50 }}{% endif %}"
    "{{ messages[0].content }}",
    "stripped length": "{% if messages[0].content.rstrip() | length > 12 %}{{ 'x' * 50 }}{% endif %}"
    "{{ messages[0].content }}",
    "starts": "{% if messages[0].content.startswith('!') %}{{ 'x' * 50 }}{% endif %}{{ messages[0].content }}",
    "length": "{% if messages[0].content | length > 12 %}{{ 'x' * 50 }}{% endif %}{{ messages[0].content }}",
    "loop": "{% for c in messages[0].content %}{{ c }}-{% endfor %}",
    "replace": "{{ messages[0].content.replace('a', 'aaaa') }}",
    "equal": "{% if messages[0].content == 'abc' %}{{ 'x' * 50 }}{% endif %}{{ messages[0].content }}",
    "split": "{{ messages[0].content.split('x')[-1] }}",
}
CLOSED = ["plain", "stripped", "needle", "stripped needle", "starts"]
CONTENTS = ["a", "abc", "!a", "please /think", " padded  ", "<&'\"\n>", "a" * 40, "<|end|><|user|>", "x y"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_cheap_bound_is_never_below_the_tokens(tokenizer, name):
    encoder = Encoder(tokenizer, None, TEMPLATES[name])
    for content, (_, count) in zip(CONTENTS, encoder.counts(CONTENTS), strict=True):
        assert len(encoder.encode(content)[1]) == count
        bound = encoder.at_most(content)
        assert bound is None or bound >= count
    assert (encoder.at_most("a") is not None) == (name in CLOSED)


@given(st.text(st.characters(max_codepoint=127), min_size=1), st.sampled_from(CLOSED))
@settings(max_examples=200, deadline=None)
def test_the_cheap_bound_holds_for_any_ascii(content, name):
    encoder = ENCODERS.setdefault(name, Encoder(tiny_tokenizer(), "sys", TEMPLATES[name]))
    bound = encoder.at_most(content)
    assert bound is None or bound >= encoder.counts([content])[0][1]


ENCODERS: dict[str, Encoder] = {}


def test_the_bound_is_known_for_the_shipped_template(tokenizer):
    """`<|user|>`, `<|assistant|>` and a slack of three: what makes a million short rows cheap."""
    assert Encoder(tokenizer, None, None).at_most("1234") == 4 + 2 + 3


# ---------------------------------------------------------------- templates, system prompt, BOS


@pytest.mark.parametrize(
    "template",
    [None, "{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}", "{{ messages[0].content | trim }}"],
    ids=["raw prompts", "template with BOS", "template without", "template that strips"],
)
def test_b10_exactly_one_bos(template):
    made = bos_tokenizer()
    data = load_data(config(data__chat_template=template), made)
    for prompt in data.next(3):
        assert prompt.token_ids[0] == made.bos_token_id
        assert prompt.token_ids.count(made.bos_token_id) == 1
        assert made.decode(prompt.token_ids) == prompt.text
    encoder = Encoder(made, None, template)
    assert encoder.counts(["ab"]) == [(2, 3)]


def test_no_bos_where_the_tokenizer_adds_none(tokenizer):
    (prompt,) = load_data(config(data__chat_template="{{ messages[0].content }}"), tokenizer).next(1)
    assert prompt.token_ids == tokenizer(prompt.text).input_ids
    assert len(prompt.token_ids) == len(prompt.text)


def test_raw_prompts_where_the_tokenizer_has_no_template():
    made = tiny_tokenizer()
    made.chat_template = None
    (prompt,) = load_data(config(), made).next(1)
    assert prompt.text.startswith("What is ")


def test_a_system_prompt_comes_first(tokenizer):
    (prompt,) = load_data(config(data__system_prompt="Be brief."), tokenizer).next(1)
    assert prompt.text.startswith("<|system|>Be brief.<|user|>What is ")


def test_a_template_can_be_a_file(tmp_path, tokenizer):
    path = tmp_path / "t.jinja"
    path.write_text("[{{ messages[0].content }}]")
    (prompt,) = load_data(config(data__chat_template=str(path)), tokenizer).next(1)
    assert prompt.text.startswith("[What is ")


@pytest.mark.parametrize("template", ["no/such/file.jinja", "{% if %}", "{{ nothing.there.at_all }}"])
def test_a_broken_template_is_one_finding(tokenizer, template):
    found = inspect(config(data__chat_template=template), tokenizer)
    assert [f.rule for f in found] == ["chat_template_available"]


def test_chat_template_available_when_it_is_needed(tmp_path):
    made = tiny_tokenizer()
    made.chat_template = None
    assert [f.rule for f in inspect(config(data__system_prompt="s"), made)] == ["chat_template_available"]
    chat = [{"role": "user", "content": "U"}]
    path = jsonl(tmp_path, {"prompt": "p", "answer": "1"}, {"prompt": chat, "answer": "1"})
    (finding,) = inspect(config(JSONL, data__train=path), made)
    assert finding.rule == "chat_template_available"
    assert f"{path}:2" in finding.message


# ---------------------------------------------------------------- the cursor


def ids(prompts) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_stream_is_whole_epochs_and_batches_cross_them(tmp_path, tokenizer, shuffle):
    path = jsonl(tmp_path, *[{"prompt": f"p{i}", "answer": "1"} for i in range(5)])
    changes = {"data__train": path, "data__shuffle": shuffle, "trainer__steps": None, "trainer__epochs": 3}
    data = load_data(config(JSONL, **changes), tokenizer)
    batches = [ids(data.next(2)) for _ in range(9)]
    assert [len(batch) for batch in batches] == [2] * 7 + [1, 0]
    stream = list(itertools.chain(*batches))
    epochs = [stream[0:5], stream[5:10], stream[10:15]]
    for epoch in epochs:
        assert sorted(epoch) == [f"row-{i}" for i in range(5)]
    assert (len({tuple(epoch) for epoch in epochs}) > 1) == shuffle


def test_without_epochs_the_stream_never_ends(tokenizer):
    data = load_data(config(), tokenizer)
    assert data.total is None
    assert len(data.next(1000)) == 1000


def test_the_order_depends_on_the_seed_alone(tokenizer):
    streams = [ids(load_data(config(run__seed=seed), tokenizer).next(20)) for seed in (1, 1, 2)]
    assert streams[0] == streams[1] != streams[2]


@pytest.mark.parametrize("before", [0, 3, 5, 12])
def test_a_restored_cursor_goes_on_exactly(tmp_path, tokenizer, before):
    path = jsonl(tmp_path, *[{"prompt": f"p{i}", "answer": "1"} for i in range(5)])
    cfg = config(JSONL, data__train=path)
    whole, data, resumed = (load_data(cfg, tokenizer) for _ in range(3))
    data.next(before)
    resumed.load_state(json.loads(json.dumps(data.state())))
    assert ids(resumed.next(9)) == ids(whole.next(before + 9))[before:]


def test_a_prompt_is_found_again_by_its_id(tmp_path, tokenizer):
    path = jsonl(tmp_path, *[{"prompt": f"p{i}", "answer": "1"} for i in range(5)])
    for cfg in (config(), config(JSONL, data__train=path)):
        data = load_data(cfg, tokenizer)
        drawn = data.next(7)
        assert [repr(data.prompt(prompt.prompt_id)) for prompt in drawn] == [repr(prompt) for prompt in drawn]
        assert data.state()["consumed"] == 7


def test_changed_data_are_noticed_and_a_copy_is_not(tmp_path, tokenizer):
    rows = [{"prompt": f"p{i}", "answer": "1"} for i in range(5)]
    state = load_data(config(JSONL, data__train=jsonl(tmp_path, *rows)), tokenizer).state()
    load_data(config(JSONL, data__train=jsonl(tmp_path, *rows, name="copy")), tokenizer).load_state(state)
    rows[2]["answer"] = "2"
    changed = load_data(config(JSONL, data__train=jsonl(tmp_path, *rows)), tokenizer)
    with pytest.raises(ConfigError, match="resume_matches_run"):
        changed.load_state(state)


def test_dropping_more_rows_than_before_is_noticed(tmp_path, tokenizer):
    path = jsonl(tmp_path, *[{"prompt": "x" * i, "answer": "1"} for i in range(1, 9)])
    changes = {"data__train": path, "data__on_long_prompt": "drop"}
    state = load_data(config(JSONL, **changes, data__max_prompt_tokens=8), tokenizer).state()
    with pytest.raises(ConfigError, match="number of usable prompts"):
        load_data(config(JSONL, **changes, data__max_prompt_tokens=6), tokenizer).load_state(state)


def test_eval_prompts_keep_the_order_and_the_limit(tokenizer):
    data = load_data(config(), tokenizer)
    assert ids(data.eval_prompts(3)) == ["eval-0", "eval-1", "eval-2"]
    assert len(data.eval_prompts(None)) == data.eval_rows == 100


def test_a_file_that_changes_under_the_run_is_an_error(tmp_path, tokenizer):
    path = jsonl(tmp_path, *[{"prompt": f"p{i}", "answer": "1"} for i in range(5)])
    data = load_data(config(JSONL, data__train=path), tokenizer)
    Path(path).write_text("x" * 500)  # in place: the open file changes with it
    with pytest.raises(RuntimeError, match="has changed since the run began"):
        data.next(5)


# ---------------------------------------------------------------- hf and reasoning_gym


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b", ("a/b", None, "train")),
        ("a/b:test", ("a/b", None, "test")),
        ("a/b:main:test", ("a/b", "main", "test")),
    ],
)
def test_hf_names(name, expected):
    assert parse_name(name, "train") == expected


def test_l01_a_loading_script_is_refused_and_not_run(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    sentinel = tmp_path / "sentinel"
    (folder / "set.py").write_text(f"open({str(sentinel)!r}, 'w')")
    for name in (str(folder), str(folder / "set.py")):
        (finding,) = check_plain(name, "data.train")
        assert finding.rule == "dataset_script_refused"
    assert not sentinel.exists()


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    hf = compose(["model=tiny", "data=hf", "data.train=a/b"]).config
    gym = compose(["model=tiny", "data=reasoning_gym"]).config
    assert [f.fix for f in inspect(schema.parse(hf), None)] == ["pip install 'grpo[hf]'"]
    assert [f.fix for f in inspect(schema.parse(gym), None)] == ["pip install 'grpo[reasoning_gym]'"]


def test_hf_reads_a_local_folder(tmp_path, tokenizer):
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder, {"prompt": "p1", "answer": 1}, {"prompt": "p2", "answer": 2}, name="train.jsonl")
    jsonl(folder, {"prompt": "e", "answer": 3}, name="test.jsonl")
    resolved = compose(["model=tiny", "data=hf", f"data.train={folder}", "trainer.prompts_per_step=1"]).config
    data = load_data(config(resolved, data__eval=str(folder)), tokenizer)
    assert sorted(prompt.answer for prompt in data.next(2)) == ["1", "2"]
    assert [prompt.answer for prompt in data.eval_prompts(None)] == ["3"]
    (finding,) = inspect(config(resolved, data__train=f"{folder}:nope"), tokenizer)
    assert finding.rule == "data_file_readable"


def test_reasoning_gym_rows(tokenizer):
    pytest.importorskip("reasoning_gym")
    resolved = compose(["model=tiny", "data=reasoning_gym", "data.train_size=20", "data.eval_size=5"]).config
    data = load_data(config(resolved), tokenizer)
    (prompt,) = data.next(1)
    assert prompt.answer == str(prompt.row["answer"])
    assert prompt.row["metadata"]["source_dataset"] == "chain_sum"
    train, held_out = ({p.text for p in prompts} for prompts in (data.next(20), data.eval_prompts(None)))
    assert not train & held_out
    (finding,) = inspect(config(resolved, data__task="chain_sums"), tokenizer)
    assert (finding.rule, finding.fix) == ("choice_known", "data.task=chain_sum")


# ---------------------------------------------------------------- any bytes at all


@given(st.binary(max_size=200))
@example(b"{}")
@example(b'{"prompt": "\\udfff"}')
@example(b'{"prompt": 1e999}')
@example(b"\xef\xbb\xbf{}")
@settings(max_examples=300, deadline=None)
def test_any_line_is_an_object_or_a_reason(line):
    try:
        found = decode_object(line)
    except ValueError:
        return
    assert isinstance(found, dict)
    json.dumps(found, ensure_ascii=False).encode()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.fixed_dictionaries({}, optional={"prompt": JSON_VALUES, "answer": JSON_VALUES}), max_size=5))
@settings(max_examples=100, deadline=None)
def test_any_rows_are_read_or_refused_with_their_line(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("fuzz") / "d.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    reader = JsonlRows(str(path), Columns("prompt", "answer"))
    for index, item in enumerate(reader.scan()):
        if isinstance(item, Row):
            assert reader.row(index) == item
            assert isinstance(item.prompt, str | list)
            assert isinstance(item.answer, str)
        else:
            assert all(bad.source == f"{path}:{index + 1}" and bad.reason for bad in item)


def test_importing_data_loads_nothing_heavy():
    heavy = ["torch", "deepspeed", "transformers", "tokenizers", "datasets", "reasoning_gym", "numpy"]
    code = f"import sys, grpo_cli.data; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
