"""Shell completion: `eval "$(grpo completion bash)"`. Everything offered is read from conf/ and the schema.

The shell function runs `grpo completion query` with COMP_LINE and COMP_POINT set, as for any completion command of
bash; the command's own name and the subcommand are stripped from that line here.
"""

from __future__ import annotations

import glob
import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from grpo_cli.errors import EXIT_OK
from grpo_cli.options import Groups, conf_dir, find_option, read_groups
from grpo_cli.terminal.parser import Parser

_BASH = r"""
_grpo_completion() {
    # `=` splits words by default, so that group=opt would arrive in pieces.
    COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
    local IFS=$'\n'
    COMPREPLY=($(COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT grpo completion query 2>/dev/null))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _grpo_completion grpo
"""

_CONFIGURED = ("train", "validate", "plan", "replay", "eval", "doctor")
FLAGS = {
    "train": ("-m", "--multirun", "--config-dir", "--help"),
    "validate": ("--json", "--data", "--explain", "--config-dir", "--help"),
    "plan": ("--json", "--config-dir", "--help"),
    "replay": ("--json", "--config-dir", "--help"),
    "eval": ("--json", "--config-dir", "--help"),
    "report": ("-o", "--output", "--help"),
    "doctor": ("--json", "--config-dir", "--help"),
    "export": ("--step", "--help"),
    "status": ("--json", "--help"),
    "completion": ("--help",),
}
_PATH_KEYS = ("run.dir", "model.path", "data.train", "data.eval", "data.chat_template", "trainer.resume")


def main(arguments: Sequence[str]) -> int:
    """Prints the shell's completion function, or (`query`) the candidates for the line in COMP_LINE."""
    parser = Parser("completion", 'Prints a completion function: eval "$(grpo completion bash)".')
    parser.add_argument("shell", choices=("bash", "query"), help="bash; query is what that function calls")
    if parser.read(arguments).shell == "bash":
        print(_BASH.strip())
        return EXIT_OK
    line = os.environ.get("COMP_LINE", "")
    point = int(os.environ.get("COMP_POINT") or len(line))
    for candidate in candidates(line[:point]):
        print(candidate)
    return EXIT_OK


def candidates(line: str) -> list[str]:
    """What the last word of a command line can become; empty where files are as good a guess as any.

    >>> candidates("grpo val")
    ['validate ']
    """
    from grpo_cli.cli import COMMANDS

    words = _split(line)
    if len(words) < 2:
        return []
    word = words[-1]
    if len(words) == 2:
        return [f"{command} " for command in COMMANDS if command.startswith(word)]
    command, before = words[1], words[2:-1]
    if word.startswith("-"):
        return [f"{flag} " for flag in FLAGS.get(command, ()) if flag.startswith(word)]
    if command == "validate" and before[-1:] == ["--explain"]:
        from grpo_cli.checks import RULES

        return [f"{rule} " for rule in RULES if rule.startswith(word)]
    if command not in _CONFIGURED or before[-1:] == ["--config-dir"]:
        return []
    if command == "replay" and all("=" in word or word.startswith("-") for word in before):
        return []  # its file comes first
    return sorted(_overrides(word, before))


def _split(line: str) -> list[str]:
    """The words up to the cursor; the last one is what is being typed, perhaps ''."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.split()
    return [*words, ""] if not line or line[-1].isspace() else words


def _overrides(word: str, before: Sequence[str]) -> Iterator[str]:
    extra = [Path(folder) for flag, folder in itertools.pairwise(before) if flag == "--config-dir"]
    dirs = [conf_dir(), *extra]
    groups = read_groups(dirs)
    head, equals, value = word.partition("=")
    prefix, key = head[: len(head) - len(head.lstrip("+~"))], head.lstrip("+~")
    if not equals:
        yield from (f"{prefix}{name}" for name in _names(key, before, dirs, groups) if name.startswith(key))
        return
    done, comma, last = value.rpartition(",")
    for choice in groups.options.get(key) or _choices(key, before, dirs, groups):
        if choice.startswith(last):
            yield f"{head}={done}{comma}{choice}" + (" " if not comma else "")
    if key in _PATH_KEYS:
        yield from (f"{head}={path}{'/' * os.path.isdir(path)}" for path in glob.glob(glob.escape(value) + "*"))


def _names(key: str, before: Sequence[str], dirs: list[Path], groups: Groups) -> Iterator[str]:
    """Groups and sections; behind a section's dot, its keys."""
    section, dot, _ = key.partition(".")
    if dot:
        yield from (f"{name}=" for name in _keys(section, before, dirs, groups))
        return
    yield from (
        f"{group}=" for group, options in groups.options.items() if len(options) > 1 or group in groups.optional
    )
    yield from (f"{section}." for section in groups.defaults)


def _keys(section: str, before: Sequence[str], dirs: list[Path], groups: Groups) -> Iterator[str]:
    """Full names of the keys that the chosen option of a group has."""
    chosen = {key.lstrip("+"): option for key, _, option in (word.partition("=") for word in before)}
    option = chosen.get(section, groups.defaults.get(section, ""))
    if file := find_option(dirs, section, option):
        yield from _flat(yaml.safe_load(file.read_text(encoding="utf-8")) or {}, section)


def _flat(values: dict[str, Any], path: str) -> Iterator[str]:
    for name, value in values.items():
        yield from _flat(value, f"{path}.{name}") if isinstance(value, dict) else (f"{path}.{name}",)


def _choices(key: str, before: Sequence[str], dirs: list[Path], groups: Groups) -> list[str]:
    """The values of an enumerated key or a switch, from the schema."""
    from grpo_cli.schema import Config

    annotation: Any = Config
    for name in key.split("."):
        fields = [model.model_fields[name] for model in _models(annotation) if name in model.model_fields]
        if not fields:
            return []
        annotation = fields[0].annotation
    return [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in _literals(annotation)]


def _models(annotation: Any) -> list[Any]:
    """The pydantic models that an annotation allows."""
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if annotation is bool:
        return [True, False]
    if annotation is type(None):
        return ["null"]
    return [literal for part in get_args(annotation) for literal in _literals(part)]
