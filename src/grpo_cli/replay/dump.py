"""Reads rollout dumps (one JSON line a group) strictly: every mistake with file:line, field and what was expected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from grpo_cli.data.jsonl import unique_keys
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.stats import LARGEST
from grpo_cli.types import Completion, Group, Prompt

RULE = "replay_file_valid"
FIX = "correct the file; docs/replay.md shows the format"
MAX_FINDINGS = 20

LOGPROB_FIELDS = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs")
TOKEN_FIELDS = (*LOGPROB_FIELDS, "entropies")

LOWEST = {"entropies": -1e-3}
"""Field -> least value of a token; an entropy of 0 may be rounded to less."""


@dataclass(frozen=True, slots=True)
class Row:
    """One group as it was read, and where it stands, for messages: `rollouts.jsonl:3` or `groups[2]`."""

    where: str
    value: Any


def read_file(path: Path) -> list[Row]:
    """The JSON values of a file of lines, blank ones skipped. Raises ConfigError with every line that is no JSON."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            _finding(f"{path} cannot be read: {error.strerror or error}.", "name a rollout dump")
        ) from None
    rows, findings = [], []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip(" \t\r\n"):  # what JSON calls blank; Python strips control characters too
                rows.append(Row(f"{path}:{number}", _DECODER.decode(text)))
        except (ValueError, RecursionError) as error:
            findings.append(_finding(f"{path}:{number}: {_reason(error)}; expected one JSON object a line."))
    if not rows and not findings:
        findings.append(_finding(f"{path} holds no group; expected one JSON object a line."))
    raise_findings(findings)
    return rows


def parse_groups(rows: list[Row]) -> list[Group]:
    """The groups of the rows, in their order. Raises ConfigError with everything that is wrong with them.

    What a replay recomputes (`dropped`, `reward`, `advantage`) is not read.
    """
    findings = [_finding(f"{row.where}: {problem}.") for row in rows for problem in _problems(row.value)]
    if not findings:
        findings = _repeated_ids(rows) + _uneven_terms(rows)
    raise_findings(findings)
    return [_group(row.value) for row in rows]


def raise_findings(findings: list[Finding]) -> None:
    """Raises ConfigError where there are findings: the first ones, and the number of the others."""
    if len(findings) > MAX_FINDINGS:
        rest = _finding(f"and {len(findings) - MAX_FINDINGS} more mistakes of this kind.")
        findings = [*findings[:MAX_FINDINGS], rest]
    if findings:
        raise ConfigError(findings)


def _finding(message: str, fix: str = FIX) -> Finding:
    return Finding(RULE, (), message, fix)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a finite number")


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_refuse)


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


# --- what a field must hold -------------------------------------------------------------------------------------------


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(item) and item >= 0 for item in value)


def _is_rewards(value: Any) -> bool:
    return isinstance(value, dict) and all(item is None or _is_number(item) for item in value.values())


_GROUP_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_is_int, "an integer"),
    "group_id": (lambda value: isinstance(value, str), "text"),
    "prompt_id": (lambda value: isinstance(value, str), "text"),
    "prompt": (lambda value: isinstance(value, str), "text"),
    "prompt_token_ids": (_is_ids, "a list of token ids"),
    "policy_version": (_is_int, "an integer"),
    "completions": (lambda value: isinstance(value, list) and bool(value), "a list of at least one completion"),
}

_COMPLETION_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda value: isinstance(value, str), "text"),
    "token_ids": (_is_ids, "a list of token ids"),
    "finish_reason": (lambda value: value in ("stop", "length"), "stop or length"),
    "rewards": (_is_rewards, f"an object of term names and finite numbers (up to {LARGEST:g}) or null"),
}


def _problems(group: Any) -> Iterator[str]:
    """What is wrong with a group as it was read, each naming the field and what was expected."""
    if not isinstance(group, dict):
        yield f"{_shown(group)} where a group was expected: one JSON object"
        return
    yield from _field_problems(group, _GROUP_FIELDS, "")
    completions = group.get("completions")
    for index, completion in enumerate(completions if isinstance(completions, list) else []):
        field = f"completions[{index}]"
        if not isinstance(completion, dict):
            yield f"{field} is {_shown(completion)}; expected an object"
            continue
        yield from _field_problems(completion, _COMPLETION_FIELDS, f"{field}.")
        yield from _list_problems(completion, field)


def _field_problems(owner: dict, fields: dict[str, tuple[Callable[[Any], bool], str]], prefix: str) -> Iterator[str]:
    for name, (is_valid, expected) in fields.items():
        if name not in owner:
            yield f"{prefix}{name} is missing; expected {expected}"
        elif not is_valid(owner[name]):
            yield f"{prefix}{name} is {_shown(owner[name])}; expected {expected}"


def _list_problems(completion: dict, field: str) -> Iterator[str]:
    ids = completion.get("token_ids")
    length = len(ids) if isinstance(ids, list) else None
    expected = f"null or a list of {'numbers' if length is None else f'{length} numbers'}, one a token"
    for name in TOKEN_FIELDS:
        values = completion.get(name)
        if name not in completion:
            if name in LOGPROB_FIELDS:
                yield f"{field}.{name} is missing; expected {expected}"
        elif values is not None and not isinstance(values, list):
            yield f"{field}.{name} is {_shown(values)}; expected {expected}"
        elif values is not None:
            if length is not None and len(values) != length:
                yield f"{field}.{name} has {len(values)} entries; expected {length}, one a token of token_ids"
            for index, value in enumerate(values):
                if not _is_number(value):
                    yield f"{field}.{name}[{index}] is {_shown(value)}; expected a finite number (up to {LARGEST:g})"
                    break
                if value < LOWEST.get(name, -LARGEST):
                    yield f"{field}.{name}[{index}] is {_shown(value)}; expected 0 or more"
                    break


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, TypeError, RecursionError):  # a number or nesting beyond JSON, or no JSON value at all
        return f"a {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _repeated_ids(rows: list[Row]) -> list[Finding]:
    """Groups that were read before: each would count twice."""
    first: dict[str, str] = {}
    return [
        _finding(f"{row.where}: group_id {_shown(row.value['group_id'])} stands in {where} already.")
        for row in rows
        if (where := first.setdefault(row.value["group_id"], row.where)) != row.where
    ]


def _uneven_terms(rows: list[Row]) -> list[Finding]:
    """Completions that lack a term that others of the file have: a silent null would change their reward."""
    names = term_names(rows)
    return [
        _finding(
            f"{row.where}: completions[{index}].rewards.{name} is missing; expected a number, or null for unscored."
        )
        for row in rows
        for index, completion in enumerate(row.value["completions"])
        for name in names
        if name not in completion["rewards"]
    ]


def term_names(rows: list[Row]) -> list[str]:
    """Names of the reward terms stored in valid rows, in the order of their first use."""
    return list(
        dict.fromkeys(name for row in rows for completion in row.value["completions"] for name in completion["rewards"])
    )


def _group(value: dict) -> Group:
    prompt = Prompt(value["prompt_id"], value["prompt"], value["prompt_token_ids"], answer=None)
    completions = [
        Completion(
            text=completion["text"],
            token_ids=completion["token_ids"],
            finish_reason=completion["finish_reason"],
            rewards=completion["rewards"],
            **{name: completion.get(name) for name in TOKEN_FIELDS},
        )
        for completion in value["completions"]
    ]
    return Group(value["group_id"], prompt, completions, value["step"], value["policy_version"])
