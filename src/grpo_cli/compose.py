"""Overrides -> one plain, resolved config, or findings that say why there is none. The only module that runs Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from grpo_cli.checks import check, in_order
from grpo_cli.errors import ConfigError, Finding
from grpo_cli.machine import native_dtype
from grpo_cli.options import PRIMARY, Groups, conf_dir, find_option, nearest, read_groups
from grpo_cli.overrides import EVERYTHING, Overrides, read
from grpo_cli.paths import absolute
from grpo_cli.schema import Config

_GLOBAL = re.compile(r"^#\s*@package\s+_global_\s*$", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(slots=True)
class Composed:
    """A composed config, or the reasons why there is none.

    `config` is a plain dict without interpolations; a missing value is still the text `???`. It is given also
    beside findings, for what else can be found in it, and None where nothing in it could be trusted.
    """

    config: dict[str, Any] | None
    findings: list[Finding] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    """As Hydra takes them: `+experiment=x`, whichever form was typed."""
    doubtful: set[str] = field(default_factory=set)
    """Keys and groups with a finding: what is wrong with them beyond it is a consequence."""
    copies: dict[str, str] = field(default_factory=dict)
    """Key -> the key whose value it takes (`${...}`): a mistake in that one is not repeated here."""

    def is_consequence(self, finding: Finding, findings: Sequence[Finding]) -> bool:
        """Whether `finding`, one of `findings`, only repeats a mistake that is already told."""
        if any(covers(doubt, key) for key in finding.keys for doubt in self.doubtful):
            return True
        source = self.copies.get(finding.keys[0]) if len(finding.keys) == 1 else None
        told = {other.keys for other in findings if other.rule == finding.rule}
        return source is not None and (source in self.doubtful or (source,) in told)


@dataclass(slots=True)
class Loaded:
    """A checked config: typed, and as the plain dict that is written to config.yaml; None where it has no form."""

    config: Config | None
    resolved: dict[str, Any] | None
    findings: list[Finding]
    overrides: list[str]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "warning"]

    def require(self) -> Config:
        """The config; raises ConfigError with every error where there is one."""
        if self.errors or self.config is None:
            raise ConfigError(self.errors)
        return self.config


def load(
    overrides: Sequence[str],
    command: str,
    config_dir: Path | None = None,
    now: datetime | None = None,
    terms: Sequence[str] | None = None,
) -> Loaded:
    """Composes a config, makes its paths absolute and runs the rules of `command` on it; all findings at once.

    `config` is None where the config has no typed form, or where a mistake in the overrides leaves it in doubt.
    `terms`, for replay, are the names of the reward terms that its file stores.
    """
    composed = compose(overrides, config_dir, now)
    if composed.config is None:
        return Loaded(None, None, composed.findings, composed.overrides)
    resolved = absolute(composed.config, Path.cwd())
    config, found = check(resolved, command, terms)
    consequences = [finding for finding in found if composed.is_consequence(finding, found)]
    findings = [*composed.findings, *(finding for finding in found if finding not in consequences)]
    return Loaded(None if composed.findings else config, resolved, in_order(findings), composed.overrides)


def covers(doubt: str, key: str) -> bool:
    """Whether a doubt about a key or group says something about `key`."""
    return doubt in (EVERYTHING, key) or key.startswith(f"{doubt}.") or doubt.startswith(f"{key}.")


def compose(overrides: Sequence[str], config_dir: Path | None = None, now: datetime | None = None) -> Composed:
    """Composes and resolves the config of one job; all mistakes at once.

    `overrides` are Hydra's; `experiment=x` and `+experiment=x` are alike, and so for every optional group.
    `config_dir` adds a user's own groups and options. `now` is the time that `${now:...}` tells.
    Whatever their order on the command line, an experiment comes before a scale, which so has the last word.
    `${share:0.2,WHOLE}` is a fraction of a count, `${native_dtype:}` the type that this machine is fast in, and
    `${jsonl:FILE}` a file that only data=jsonl is to read. No environment variable is needed, and no state of Hydra is
    left behind.
    """
    shipped = conf_dir()
    dirs = [shipped] if config_dir is None else [shipped, config_dir.resolve()]
    if problem := bad_config_dir(config_dir):
        return Composed(None, [problem])
    groups = read_groups(dirs)
    asked = read(overrides, groups)
    optional = groups.optional
    chosen = sorted(asked.choices.items(), key=lambda choice: (*optional, choice[0]).index(choice[0]))
    choices = [f"{'+' * (group in optional)}{group}={option}" for group, option in chosen]
    composed = Composed(
        None, asked.findings, [*choices, *(str(value.input_line) for value in asked.values)], asked.doubtful
    )
    config = _compose_groups(choices, dirs, asked, groups)
    if config is None:
        return composed
    shipped_values = dict(_leaves(OmegaConf.to_container(config, resolve=False)))
    for value in asked.values:
        _apply(value, config, asked)
    stamp = now or datetime.now()
    OmegaConf.register_new_resolver("now", lambda pattern: stamp.strftime(pattern), replace=True)
    OmegaConf.register_new_resolver("share", lambda fraction, whole: round(fraction * whole), replace=True)
    OmegaConf.register_new_resolver("native_dtype", native_dtype, replace=True)
    OmegaConf.register_new_resolver("jsonl", _only_for_jsonl, replace=True)
    composed.copies = dict(_copies(config))
    _refuse_unresolved(config, shipped_values, asked)
    composed.config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return composed


def _only_for_jsonl(file: str, *, _parent_: DictConfig) -> str | None:
    """The file where the group that holds it is data=jsonl; null where other data were chosen beside an experiment."""
    return file if _parent_.get("name") == "jsonl" else None


def bad_config_dir(config_dir: Path | None) -> Finding | None:
    """Why a user's config directory cannot be used; None where it can, or where none is given."""
    if config_dir is None:
        return None
    keys, shipped = ("--config-dir",), conf_dir()
    if not config_dir.is_dir():
        return Finding("config_composes", keys, f"--config-dir {config_dir}: no such directory.", "--config-dir DIR")
    for file in sorted(config_dir.rglob("*.yaml")):
        part = file.relative_to(config_dir)
        if (shipped / part).is_file():
            message = f"--config-dir {config_dir}: {part} has the name of a shipped option, which would hide it."
            return Finding("config_composes", keys, message, f"mv {file} {file.with_stem('my_' + file.stem)}")
    return None


def _compose_groups(choices: list[str], dirs: list[Path], asked: Overrides, groups: Groups) -> DictConfig | None:
    """The groups that were chosen, without the values; None, and a finding, where they do not fit together."""
    if _misplaced(dirs, asked, groups):
        return None
    try:
        contents = tuple(file.read_bytes() for top in dirs for file in sorted(top.rglob("*.yaml")) if file.is_file())
        config = deepcopy(_hydra(tuple(choices), tuple(dirs), contents))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        finding = _composition_finding(error, dirs, asked, groups)
        asked.findings.append(finding)
        asked.doubtful.add(EVERYTHING)
        return None
    OmegaConf.set_struct(config, False)
    return config


@lru_cache(maxsize=64)
def _hydra(choices: tuple[str, ...], dirs: tuple[Path, ...], _contents: tuple[bytes, ...]) -> DictConfig:
    """What Hydra makes of the chosen options; kept for as long as no file changes: the jobs of a sweep share it."""
    extra = [QuotedString(f"file://{path}", Quote.double).with_quotes() for path in dirs[1:]]
    search = [f"hydra.searchpath=[{','.join(extra)}]"] if extra else []
    with initialize_config_dir(config_dir=str(dirs[0]), version_base=None, job_name="grpo"):
        return hydra_compose(PRIMARY, overrides=[*search, *choices])


def _misplaced(dirs: list[Path], asked: Overrides, groups: Groups) -> bool:
    """Reports the chosen options of optional groups whose values would land where nothing reads them."""
    wrong = False
    for group, option in asked.choices.items():
        file = find_option(dirs, group, option)
        if group in groups.optional and file and not _GLOBAL.search(file.read_text(encoding="utf-8", errors="replace")):
            message = f"{file}: without `# @package _global_` its values land under {group}, where nothing reads them."
            fix = f"add the line `# @package _global_` at the top of {file}"
            asked.blame("config_composes", group, message, fix, EVERYTHING)
            wrong = True
    return wrong


def _composition_finding(error: Exception, dirs: list[Path], asked: Overrides, groups: Groups) -> Finding:
    """What Hydra's complaint about the files means, in this tool's words."""
    cause = error.__cause__ if not str(error) and error.__cause__ else error
    text = " ".join(str(cause).split())
    chosen = {group: find_option(dirs, group, option) for group, option in asked.choices.items()}
    files = [str(file) for group, file in chosen.items() if group in groups.optional and file] or [str(dirs[-1])]
    where = " and ".join(files)
    if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
        group, _, option = str(cause.missing_cfg_file).lstrip("/").partition("/")
        inner, _, inner_option = option.partition("/")
        if group in groups.optional and inner in groups.defaults:
            message = f"{where}: `{inner}: {inner_option}` is looked for below {group}/."
            return Finding("config_composes", (group,), message, f"use `override /{inner}: {inner_option}` in {where}")
        known = groups.options.get(group, ())
        message = f"{where}: {group} has no option {option}; it has {', '.join(known) or 'none'}."
        return Finding("option_known", (group,), message, f"{group}: {nearest(option, known)} in {where}")
    if match := re.search(r"Multiple values for ([\w/]+)", text):
        group = match[1]
        option = (re.search(r"override [\w/]+: ([\w/]+)", text) or ["", "OPTION"])[1]
        message = f"{where}: {group} is chosen a second time without `override`."
        return Finding("config_composes", (group,), message, f"use `override /{group}: {option}` in {where}")
    return Finding("config_composes", tuple(chosen) or ("defaults",), f"{where}: {text}", f"correct {where}")


def _apply(override: Override, config: DictConfig, asked: Overrides) -> None:
    """Sets or deletes one value. A key that does not exist yet is set too: the schema then names the nearest one."""
    key = override.key_or_group
    if override.is_delete():
        node, _, leaf = key.rpartition(".")
        parent = OmegaConf.select(config, node) if node else config
        if not isinstance(parent, DictConfig) or leaf not in parent:
            known = nearest(key, _keys(config))
            message = f"{override.input_line}: there is no {key}; did you mean {known}?"
            asked.blame("key_known", key, message, f"remove {override.input_line}")
            return
        with open_dict(parent):
            del parent[leaf]
        return
    try:
        OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        asked.blame(
            "override_parses", key, f"{override.input_line} cannot be set: {reason}", f"remove {override.input_line}"
        )


def _keys(config: DictConfig) -> list[str]:
    """Full names of all values."""
    return [path for path, _ in _leaves(OmegaConf.to_container(config, resolve=False))]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its full name, for example `reward.terms.0.weight`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for name, child in items:
        yield from _leaves(child, f"{path}.{name}" if path else str(name))


def _copies(config: DictConfig) -> Iterator[tuple[str, str]]:
    for path, value in _leaves(OmegaConf.to_container(config, resolve=False)):
        if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)):
            yield path, match[1]


def _refuse_unresolved(config: DictConfig, shipped: dict[str, Any], asked: Overrides) -> None:
    """Reports each interpolation without a target under its own key, and sets it to null so that the rest resolves.

    `shipped` has the values without overrides; the fix puts one of these back.
    """
    known_bad = {*asked.doubtful, *(value.key_or_group for value in asked.values if value.is_delete())}
    for path, raw in list(_leaves(OmegaConf.to_container(config, resolve=False))):
        if not isinstance(raw, str) or "${" not in raw:
            continue
        reason = _why_unresolved(config, path)
        if reason is None:
            continue
        OmegaConf.update(config, path, None)
        if not reason or any(covers(doubt, key) for key in _REFERENCE.findall(raw) for doubt in known_bad):
            asked.doubtful.add(path)
            continue
        asked.blame(
            "interpolation_resolves",
            path,
            f"{path}={raw} has no value: {reason}.",
            f"{path}={shipped.get(path, 'VALUE')}",
        )


def _why_unresolved(config: DictConfig, path: str) -> str | None:
    """None where the value resolves; '' where it lacks only a value (`???`) that is told under its own key."""
    try:
        value = OmegaConf.select(config, path)
    except InterpolationToMissingValueError:
        return ""
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return "it names a group of keys" if isinstance(value, DictConfig | ListConfig) else None
