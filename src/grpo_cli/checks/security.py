"""Rules that keep a config from running code or giving away secrets. Nothing here runs the code in question."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlunsplit

from grpo_cli.checks.engine import REMOVE, Changes, Found, View, broken, declare, error, state, warning
from grpo_cli.checks.model import is_local
from grpo_cli.checks.quantities import crosses_open_network, split_url
from grpo_cli.checks.reward import names_code
from grpo_cli.checks.shape import CALLABLE_KEYS


@warning("model.trust_remote_code")
def trust_remote_code_off(c: View) -> Found:
    """Python from the model repository runs in every process and in the engine."""
    if c.model.trust_remote_code:
        yield broken(
            f"model.trust_remote_code=true runs Python from {state(c, 'model.path')} in every process.",
            {"model.trust_remote_code": False},
        )


@warning("model.revision", "model.trust_remote_code", "model.path")
def remote_code_needs_pinned_revision(c: View) -> Found:
    """The code that runs can change between two starts. Set model.revision to a commit hash."""
    if c.model.trust_remote_code and c.model.revision is None and c.model.path and not is_local(c.model.path):
        yield broken(
            f"model.trust_remote_code=true runs whatever {state(c, 'model.path')} holds at the start; pin "
            "model.revision to a commit hash.",
            {"model.trust_remote_code": False},
        )


@error("reward.terms")
def python_reward_needs_opt_in(c: View) -> Found:
    """A term's name holds `.`, `/` or `:`, as a path or a callable does. A config alone would pick any importable code.
    A python term, {name: python, path: FILE.py, function: NAME}, is the opt-in."""
    for index, term in enumerate(c.reward.terms):
        if isinstance(term.name, str) and names_code(term.name):
            key = f"reward.terms.{index}"
            path, function = _file_and_function(term.name)
            yield broken(
                f"{state(c, f'{key}.name')} is a path or a callable; only a python term, with its path and function, "
                "runs a file.",
                Changes({f"{key}.name": "python", f"{key}.path": path, f"{key}.function": function}),
                keys=(f"{key}.name", "reward.terms"),
            )


@error("reward.terms")
def python_reward_names_a_file(c: View) -> Found:
    """A python term names a .py file and a function defined in it. A module or dotted name would reach code outside
    the named file."""
    for index, term in enumerate(c.reward.terms):
        if term.name != "python":
            continue
        wrong = {}
        if not term.path.endswith(".py"):
            wrong[f"reward.terms.{index}.path"] = _file_and_function(term.path)[0]
        if not term.function.isidentifier():
            wrong[f"reward.terms.{index}.function"] = _file_and_function(term.function)[1]
        if wrong:
            yield broken(
                f"{state(c, *wrong)}: a python term names a .py file and a plain function in it.",
                wrong,
                keys=(*wrong, "reward.terms"),
            )


@error()
def no_callables_in_config(c: View) -> Found:
    """Keys such as _target_ would let a config name any importable callable. Options are chosen by their name."""
    for key in _callable_keys(c._values):
        yield broken(f"{state(c, key)} names code to run; no key of a config does.", {key: REMOVE}, keys=(key,))


@error("data.train", "data.eval")
def dataset_script_refused(c: View) -> Found:
    """A loading script is code from the data set's author. Name a data set of plain files."""
    for key in ("train", "eval"):
        value = getattr(c.data, key)
        if value is not None and value.endswith(".py"):
            mended = {f"data.{key}": re.sub(r"\.py$", ".jsonl", value)}
            yield broken(f"{state(c, f'data.{key}')} is a script; name plain files.", mended, keys=(f"data.{key}",))


@error("rollout.server_url")
def no_credentials_in_urls(c: View) -> Found:
    """The address is written to config.yaml and to the logger. Pass credentials by the environment."""
    url = c.rollout.server_url
    if url is not None and "@" in url:
        yield broken(
            "rollout.server_url holds a user or password.",
            {"rollout.server_url": _bare(url)},
            {"rollout.server_url": None},
        )


@warning("rollout.server_url")
def remote_server_needs_https(c: View) -> Found:
    """Prompts and weights would cross the network open, and anyone could update the engine. Use https://, or a tunnel
    to localhost."""
    parts = split_url(c.rollout.server_url) if c.rollout.server_url else None
    if parts and parts.scheme == "http" and crosses_open_network(parts.hostname or ""):
        yield broken(
            f"rollout.server_url reaches {parts.hostname} without encryption.",
            {"rollout.server_url": _bare(urlunsplit(parts._replace(scheme="https")))},
        )


def _bare(url: str) -> str:
    """An address without user and password."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _file_and_function(name: str) -> tuple[str, str]:
    """A .py file and a function that a path or dotted name may have meant."""
    path, _, function = name.rpartition(":")
    if not path:
        path, _, function = (name, "", "") if "/" in name or name.endswith(".py") else name.rpartition(".")
    path = path if "/" in path or path.endswith(".py") else path.replace(".", "/")
    path = path if path.endswith(".py") else f"{path or 'reward'}.py"
    return path, function if function.isidentifier() else "score"


def _callable_keys(value: Any, path: str = "") -> Iterator[str]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        key = f"{path}.{name}" if path else str(name)
        if name in CALLABLE_KEYS:
            yield key
        else:
            yield from _callable_keys(child, key)


declare(
    "checkpoint_is_plain_data", "error", "security", "start", "trainer.resume",
    why="""A file that trainer.resume would load needs unpickling that runs code. Loading it could run anything. Use a
    checkpoint written by grpo.""",
)  # fmt: skip
