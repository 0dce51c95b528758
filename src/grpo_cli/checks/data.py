"""Rules of the data that the config alone can tell."""

from __future__ import annotations

from grpo_cli.checks.engine import Found, View, broken, declare, error, state, warning
from grpo_cli.checks.keys import term_models
from grpo_cli.checks.quantities import file_data


@error("data.train", "data.name")
def file_data_needs_train(c: View) -> Found:
    """Without a file there is nothing to train on; it would fail after the model is loaded."""
    if file_data(c) and not c.data.train:
        example = "train.jsonl" if c.data.name == "jsonl" else "openai/gsm8k:main:train"
        yield broken(f"data.name={c.data.name} reads data.train, which is empty.", {"data.train": example})


@error("data.prompt_key", "data.name")
def file_data_needs_prompt_key(c: View) -> Found:
    """The column of the prompt is not named: a KeyError deep in the loop."""
    if file_data(c) and not c.data.prompt_key:
        yield broken(f"data.name={c.data.name} needs the column of the prompt.", {"data.prompt_key": "prompt"})


@error("data.answer_key", "reward.terms", "data.name")
def answer_reward_needs_answer_key(c: View) -> Found:
    """A term compares with the gold answer, whose column is not named. Every comparison would be with nothing: all
    rewards 0. A python term that takes `answer` without a default counts too, at run start."""
    reading = {name for name, model in term_models().items() if getattr(model, "reads_answer", False)}
    readers = [term.name for term in c.reward.terms if term.name in reading]
    if file_data(c) and not c.data.answer_key and readers:
        message = f"The term {readers[0]} compares with data.answer_key, which is empty."
        yield broken(message, {"data.answer_key": "answer"})


@error("trainer.eval_every", "data.eval", "data.name")
def eval_every_needs_eval_data(c: View) -> Found:
    """There are no rows to evaluate on: evaluation would fail at its first step, or be skipped silently."""
    if file_data(c) and c.trainer.eval_every is not None and not c.data.eval:
        yield broken(
            f"{state(c, 'trainer.eval_every')} evaluates on data.eval, which is empty; name a file of held-out rows.",
            {"trainer.eval_every": None},
        )


@warning("data.eval", "data.train", "data.name")
def eval_data_differs_from_train(c: View) -> Found:
    """Evaluation on the training rows measures the memory of them."""
    if file_data(c) and c.data.eval and c.data.eval == c.data.train:
        message = f"{state(c, 'data.eval', 'data.train')} are the same rows; name held-out ones."
        yield broken(message, {"data.eval": None})


declare(
    "data_file_readable", "error", "data", "start", "data.train", "data.eval",
    why="""data.train or data.eval cannot be opened: it would fail after the launch, once for each process. Correct the
    path.""",
)  # fmt: skip
declare(
    "data_rows_valid", "error", "data", "start", "data.train", "data.eval",
    why="""A row is no JSON object in UTF-8, or a prompt or answer is neither text, number nor chat list. Repair the
    lines in the message.""",
)  # fmt: skip
declare(
    "data_has_keys", "error", "data", "start", "data.prompt_key", "data.answer_key",
    why="""data.prompt_key or data.answer_key is missing or null in a row: a KeyError, or comparisons with nothing.
    Name the right column, or repair the row.""",
)  # fmt: skip
declare(
    "prompts_not_empty", "error", "data", "start", "data.prompt_key", "data.train",
    why="""A prompt is blank or tokenises to nothing. A zero-length input crashes generation. Remove the listed
    rows.""",
)  # fmt: skip
declare(
    "prompts_fit", "error", "data", "start", "data.max_prompt_tokens", "data.on_long_prompt",
    why="""data.on_long_prompt is error and a templated prompt has more than data.max_prompt_tokens tokens. The engine
    would die thousands of steps later while other processes hang. Raise data.max_prompt_tokens, or set
    data.on_long_prompt=drop.""",
)  # fmt: skip
declare(
    "text_free_of_control_characters", "error", "data", "start", "data.train", "data.eval",
    why=r"""A prompt or answer holds U+0008 or U+000C. That is unescaped LaTeX: \frac became form feed + rac, and no
    answer can match. Double the backslashes in the listed lines.""",
)  # fmt: skip
declare(
    "answers_on_one_line", "warning", "data", "start", "data.answer_key", "data.train",
    why=r"""An answer holds a tab, carriage return or newline. Often that is unescaped LaTeX: \text became tab + ext.
    Double the backslashes in the listed lines.""",
)  # fmt: skip
declare(
    "chat_template_available", "error", "data", "start", "data.chat_template", "data.system_prompt", "model.path",
    why="""data.system_prompt is set, or prompts are chat lists, but data.chat_template is null and the tokenizer has no
    template. The system prompt would be lost, or the tokenizer raises. Set data.chat_template.""",
)  # fmt: skip
declare(
    "eval_rows_not_in_train", "warning", "data", "start", "data.eval", "data.train",
    why="""A prompt of data.eval is also in data.train. Evaluation reads better than it is. Remove the listed rows from
    one of them.""",
)  # fmt: skip
