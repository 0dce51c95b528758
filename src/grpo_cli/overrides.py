"""What was typed after the command, in Hydra's override grammar: read, and every mistake named.

Group choices (`loss=gspo`) and values (`trainer.lr=1e-6`) are told apart here, so that a misspelt option, a value
that must be quoted and a stray comma are all found in one go; Hydra itself stops at the first, with exit code 1.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.checks.keys import annotation_of
from grpo_cli.errors import Finding
from grpo_cli.options import Groups, nearest

EVERYTHING = "*"
"""The doubtful "key" of a mistake after which no other finding about the config can be trusted."""

_HARMLESS_HYDRA_KEYS = ("hydra.verbose", "hydra.job.chdir")
_OWN_FORM_OF_HYDRA_KEYS = {"hydra.run.dir": "run.dir", "hydra.sweep.dir": "run.dir", "hydra.mode": "-m"}


@dataclass(slots=True)
class Overrides:
    """The overrides of one config: one option a group, values in the order they were typed, and the mistakes.

    `doubtful` holds the keys and groups that a mistake is about: what else is found about them is its consequence.
    """

    choices: dict[str, str] = field(default_factory=dict)
    values: list[Override] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)

    def blame(self, rule: str, key: str, message: str, fix: str, doubtful: str | None = None) -> None:
        """Adds an error about `key`; `doubtful` is the key or group that it spoils, by default `key` itself."""
        self.findings.append(Finding(rule, (key,), message, fix))
        self.doubtful.add(doubtful or key)


def read(arguments: Sequence[str], groups: Groups) -> Overrides:
    """Reads the overrides of one job; a list of values without `-m` is a mistake here."""
    result = Overrides()
    parser = OverridesParser.create()
    for argument in arguments:
        override = parse(argument, parser, result, groups)
        if override is None:
            continue
        if override.is_sweep_override():
            _blame_sweep(override, result, groups)
        elif override.is_hydra_override():
            _check_hydra_key(override, result)
        elif override.package is not None:
            key = override.key_or_group
            value = override.get_value_string() if "=" in argument else ""
            result.blame(
                "config_composes", key, f"{argument}: a group cannot be placed elsewhere (@).", f"{key}={value}"
            )
        elif override.key_or_group in groups.options:
            _choose(override, result, groups)
        elif not _blame_misspelt_group(override, result, groups):
            result.values.append(override)
    # An experiment is the base that every other optional group, such as a scale, changes.
    result.choices = dict(sorted(result.choices.items(), key=lambda choice: choice[0] != "experiment"))
    return result


def parse(argument: str, parser: OverridesParser, result: Overrides, groups: Groups) -> Override | None:
    """One override in Hydra's grammar; None, and a finding in `result`, where it is not."""
    try:
        override = parser.parse_override(argument)
        if override.key_or_group:
            return override
        reason = "there is no key before ="
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raw_key, equals, value = argument.partition("=")
    key = raw_key.lstrip("+~")
    if not equals or not key:
        result.blame(
            "override_parses", argument, f"{argument}: an override is KEY=VALUE.", _whole_override(argument, groups)
        )
        return None
    quoted = f"{raw_key}={_quoted(value, parser)}"
    message = f"{argument} is not in the override grammar ({reason}); with the value quoted it is: {quoted}"
    fixes = [quote(quoted)]
    if (without := _without_stray_commas(argument, parser)) is not None:
        message = f"{argument} is not in the override grammar ({reason}); without the stray comma it is: {without}"
        sweep = "-m " * parser.parse_override(without).is_sweep_override()
        fixes = [sweep + quote(without)] + fixes * _takes(key, str)
    result.blame("override_parses", key, message, ", or ".join(fixes))
    return None


def _whole_override(argument: str, groups: Groups) -> str:
    """KEY=VALUE for a word that was typed alone: an option gets its group, a group one of its options."""
    word = argument.strip("=+~")
    for group in sorted(groups.options, key=lambda group: group in groups.defaults):
        if word in groups.options[group]:
            return f"{group}={word}"
    if word in groups.options:
        return f"{word}={groups.defaults.get(word, groups.options[word][0])}"
    return f"{word or 'KEY'}=VALUE"


def _parses(argument: str, parser: OverridesParser) -> bool:
    try:
        return bool(parser.parse_override(argument).key_or_group)
    except (HydraException, OmegaConfBaseException, ValueError):
        return False


def _without_stray_commas(argument: str, parser: OverridesParser) -> str | None:
    """`loss=gspo` of `loss=gspo,`; None where it is no comma without a value that is wrong, or not it alone."""
    key, _, value = argument.partition("=")
    without = f"{key}={','.join(part for part in value.split(',') if part.strip())}"
    return without if without != argument and without[-1] != "=" and _parses(without, parser) else None


def _takes(key: str, kind: type) -> bool:
    """Whether values of a key may be of this type."""
    annotation = annotation_of(key, {})
    return any(kind in (option, get_origin(option)) for option in (annotation, *get_args(annotation)))


def _quoted(value: str, parser: OverridesParser) -> str:
    """The value in double quotes as the grammar wants them; of lists and groups of keys, what needs them in there."""
    inner = value[1:-1]
    if value.startswith("[") and value.endswith("]"):
        quoted = "[" + ",".join(_quoted_part(part, parser) for part in _parts(inner) if part.strip()) + "]"
    elif value.startswith("{") and value.endswith("}"):
        pairs = (part.partition(":") for part in _parts(inner) if part.strip())
        quoted = "{" + ",".join(f"{name.strip()}:{_quoted_part(child, parser)}" for name, _, child in pairs) + "}"
    else:
        return _quoted_text(value)
    return quoted if _parses(f"key={quoted}", parser) else _quoted_text(value)


def _quoted_part(part: str, parser: OverridesParser) -> str:
    part = part.strip()
    return part if _parses(f"key={part}", parser) else _quoted(part, parser)


def _parts(text: str) -> Iterator[str]:
    """What stands between the commas of a text that lie in no bracket and no quotes."""
    depth, mark, begin = 0, "", 0
    for place, sign in enumerate(text):
        if mark or sign in "'\"":
            mark = "" if sign == mark else mark or sign
        elif sign in "[]{}":
            depth += 1 if sign in "[{" else -1
        elif sign == "," and depth <= 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def _quoted_text(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return QuotedString(text, Quote.double).with_quotes()


def _blame_sweep(override: Override, result: Overrides, groups: Groups) -> None:
    key, argument, value = override.get_key_element(), str(override.input_line), override.get_value_string()
    message = f"{argument} is ambiguous: several values are a sweep, which needs -m"
    fixes = [f"-m {quote(argument)}"]
    plain_key = override.key_or_group
    if plain_key not in groups.options and override.is_choice_sweep() and "(" not in value:
        known = annotation_of(plain_key, {}) is not None
        if _takes(plain_key, list) or not known:
            message += f"; a list is written {key}=[{value}]"
            fixes.append(quote(f"{key}=[{value}]"))
        if _takes(plain_key, str):
            text = f"{key}={_quoted_text(argument.partition('=')[2])}"
            message += f"; a text with a comma is written {text}"
            # A blank behind the comma is how people write, not how they list values.
            fixes.insert(0 if ", " in argument else 1, quote(text))
    result.blame("override_parses", plain_key, f"{message}.", ", or ".join(fixes))


def _check_hydra_key(override: Override, result: Overrides) -> None:
    key = override.key_or_group
    if key in _HARMLESS_HYDRA_KEYS:
        return
    own = _OWN_FORM_OF_HYDRA_KEYS.get(key)
    fix = f"{own}={override.get_value_string()}" if own == "run.dir" else own or f"remove {override.input_line}"
    result.blame("key_known", key, f"{override.input_line}: grpo does not read {key}.", fix)


def _blame_misspelt_group(override: Override, result: Overrides, groups: Groups) -> bool:
    """Whether a key without a dot, which is never a value's key, is much like the name of a group."""
    key = override.key_or_group
    like = difflib.get_close_matches(key, groups.options, n=1, cutoff=0.6)
    if "." in key or not like or override.is_delete():
        return False
    option = nearest(str(override.value()), groups.options[like[0]])
    message = f"{override.input_line}: there is no group {key}; the nearest is {like[0]}."
    result.blame("key_known", key, message, f"{like[0]}={option}")
    return True


def _choose(override: Override, result: Overrides, groups: Groups) -> None:
    """Takes a group choice, with or without `+`, or says what is wrong with it."""
    group, base = override.key_or_group, override.key_or_group in groups.defaults
    spoils = group if base else EVERYTHING
    value = None if override.is_delete() else override.value()
    if value is None:
        if base:
            off = "none" if "none" in groups.options[group] else groups.defaults[group]
            message = f"{override.input_line}: the group {group} is read by every run and cannot be left out."
            result.blame("group_present", group, message, f"{group}={off}", spoils)
        return
    if isinstance(value, list):
        _blame_two(group, [str(option) for option in value], result, spoils)
    elif group in result.choices:
        _blame_two(group, [result.choices[group], str(value)], result, spoils)
    elif str(value) not in groups.options[group]:
        known = ", ".join(groups.options[group])
        message = f"{group}={value}: {group} has no such option; it has {known}."
        result.blame("option_known", group, message, f"{group}={nearest(str(value), groups.options[group])}", spoils)
    else:
        result.choices[group] = str(value)


def _blame_two(group: str, options: list[str], result: Overrides, spoils: str) -> None:
    message = f"{' and '.join(f'{group}={option}' for option in options)}: one {group} only."
    result.blame(
        "config_composes", group, message, f"{group}={options[0]}" if options else f"remove {group}=[]", spoils
    )


def jobs(arguments: Sequence[str], groups: Groups) -> tuple[list[list[str]], list[Finding]]:
    """The overrides of every job of a sweep, in order: the product of all lists of values, the last one fastest.

    A swept key that is given twice is refused: the product would hold it twice, and combinations would be lost.
    Overrides that do not parse are left as they are; every job reports them with its own findings.
    """
    result = Overrides()
    parser = OverridesParser.create()
    choices: list[list[str]] = []
    given: dict[str, list[bool]] = {}
    for argument in arguments:
        override = parse(argument, parser, result, groups)
        if override is None:
            continue
        swept = override.is_sweep_override()
        given.setdefault(override.key_or_group, []).append(swept)
        choices.append(_expand(override, result, groups) if swept else [argument])
    for key, sweeps in given.items():
        if len(sweeps) > 1 and any(sweeps):
            lines = [argument for argument in arguments if argument.lstrip("+~").partition("=")[0] == key]
            message = f"{' '.join(lines)}: {key} is given {len(sweeps)} times; a sweep takes one override a key."
            result.blame("config_composes", key, message, quote(lines[0]))
    return [list(job) for job in itertools.product(*choices)], result.findings


def _expand(override: Override, result: Overrides, groups: Groups) -> list[str]:
    """The single overrides of one swept override: a comma list, choice(), range() or glob()."""
    key = override.key_or_group
    if override.is_hydra_override() or not override.is_discrete_sweep():
        result.blame("override_parses", key, f"{override.input_line}: this cannot be swept.", f"{key}=VALUE1,VALUE2")
        return []
    values = [f"{override.get_key_element()}={value}" for value in _sweep_values(override, groups)]
    if not values:
        result.blame(
            "override_parses", key, f"{override.input_line}: the sweep holds no value.", f"{key}=VALUE1,VALUE2"
        )
    return values


def _sweep_values(override: Override, groups: Groups) -> Iterator[str] | Iterable[str]:
    raw: Any = override._value  # Hydra's own iterator of a glob wants a config loader
    if isinstance(raw, Glob):
        return raw.filter(list(groups.options.get(override.key_or_group, ())))
    return override.sweep_string_iterator()
