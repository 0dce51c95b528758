"""From the columns of a row to its prompt and answer, or to all that is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from grpo_cli.data.rows import Bad, Row


class Columns:
    """Reads `prompt_key` and `answer_key` (None: the data have no answers) out of rows of one data set."""

    def __init__(self, prompt_key: str, answer_key: str | None):
        self.prompt_key = prompt_key
        self.answer_key = answer_key

    def read(self, columns: Mapping[str, Any], source: str) -> Row | list[Bad]:
        """The row, or the reasons why it is none. Numbers become their text; `answer` None only without a key."""
        bad: list[Bad] = []
        prompt = columns.get(self.prompt_key)
        if type(prompt) is not str:
            prompt = self._value(columns, "data.prompt_key", self.prompt_key, source, bad)
        answer = None
        if self.answer_key is not None:
            answer = columns.get(self.answer_key)
            if type(answer) is not str:
                answer = self._value(columns, "data.answer_key", self.answer_key, source, bad)
        if isinstance(prompt, list):
            bad.extend(chat_problems(prompt, source))
        elif isinstance(prompt, str) and not prompt.strip():
            bad.append(Bad("prompts_not_empty", source, "the prompt is blank"))
        if isinstance(answer, list):
            bad.append(Bad("data_rows_valid", source, f"{self.answer_key} is a list, not text or a number"))
        for name, value in (("prompt", prompt), ("answer", answer)):
            if value is not None and _holds_control(value):
                bad.append(Bad("text_free_of_control_characters", source, f"the {name} holds a backspace or form feed"))
        if bad or prompt is None:
            return bad
        return Row(prompt, answer, columns, source)

    def _value(self, columns: Mapping[str, Any], key: str, name: str, source: str, bad: list[Bad]) -> Any:
        value = columns.get(name)
        if isinstance(value, str):
            return value
        if value is None:
            bad.append(Bad("data_has_keys", source, _missing(columns, key, name)))
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float, list)):
            bad.append(Bad("data_rows_valid", source, f"{name} is {_kind(value)}, not text, a number or a chat list"))
            return None
        return value if isinstance(value, list) else str(value)


def _missing(columns: Mapping[str, Any], key: str, name: str) -> str:
    if name in columns:
        return f"{name} ({key}) is null"
    near = difflib.get_close_matches(name, [str(column) for column in columns], n=1, cutoff=0.6)
    hint = f"; the nearest is {near[0]}" if near else ""
    return f"no column {name} ({key}); there are {', '.join(map(str, columns)) or 'none'}{hint}"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "an object" if isinstance(value, Mapping) else f"of type {type(value).__name__}"


def _holds_control(value: str | list[Any]) -> bool:
    if isinstance(value, str):
        return "\b" in value or "\f" in value
    return any(isinstance(message, dict) and _holds_control(str(message.get("content"))) for message in value)


def chat_problems(chat: list[Any], source: str) -> list[Bad]:
    """What keeps a list from being a chat: messages with a role and text, the last one with something to answer."""
    for index, message in enumerate(chat):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return [Bad("data_rows_valid", source, f"message {index} of the chat list has no role")]
        if not isinstance(message.get("content"), str):
            return [Bad("data_rows_valid", source, f"the content of message {index} of the chat list is not text")]
    if not chat or not chat[-1]["content"].strip():
        return [Bad("prompts_not_empty", source, "the chat list is empty or its last message is blank")]
    return []
