"""Shape of the config: every key known, every value given, typed, finite and in its range. The schema is the source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from grpo_cli.checks.engine import REMOVE, Broken, Changes, declare, lookup
from grpo_cli.checks.keys import choices, closest_member, dotted, known_keys, members, nullable, tag, term_models
from grpo_cli.checks.overrides import render
from grpo_cli.checks.suggest import default_option, misnamed, suggested_value
from grpo_cli.data.arithmetic import misfit
from grpo_cli.options import nearest
from grpo_cli.schema import Config
from grpo_cli.stats import LARGEST

CALLABLE_KEYS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys that would let a config name any code; the rule `no_callables_in_config` reports them."""

NULL_HAS_ITS_RULE = ("run.name", "model.path")
"""Keys whose null is told by a rule of their own."""

AT_LEAST = {
    "trainer.prompts_per_step": 1,
    "rollout.num_generations": 1,
    "trainer.updates_per_step": 1,
    "trainer.epochs_per_step": 1,
    "trainer.micro_batch_tokens": 1,
    "trainer.nproc_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.steps": 1,
    "trainer.epochs": 1,
    "trainer.save_every": 1,
    "trainer.eval_every": 1,
    "rollout.max_new_tokens": 1,
    "rollout.max_model_len": 1,
    "rollout.tensor_parallel_size": 1,
    "data.max_prompt_tokens": 1,
    "reward.workers": 1,
    "filter.max_empty_steps": 1,
    "trainer.warmup_steps": 0,
    "rollout.max_staleness": 0,
    "run.seed": 0,
    "data.train_size": 1,
    "data.eval_size": 0,
    "eval.samples": 1,
    "eval.max_new_tokens": 1,
    "eval.limit": 1,
    "trainer.max_nonfinite_steps": 1,
    "trainer.step_timeout_s": 1,
}
"""Lowest allowed count of a key; a null is no count."""

MAX_SEED = 2**63 - 1
"""What torch takes as a seed."""

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "regular_expression": "a Python regular expression",
    "list_type": "a list",
    "dict_type": "a group of keys",
    "model_type": "a group of keys",
    "model_attributes_type": "a group of keys",
}


class Shape:
    """What a config's shape comes to: `found`, the `bad` keys that no rule may read, and the `typed` config.

    `typed` is None where the types do not hold; it may be there beside findings about missing values and ranges.
    """

    def __init__(self, resolved: Mapping[str, Any]):
        self.resolved = resolved
        self.found: list[Broken] = []
        self.typed: Config | None = None
        self._sections()
        self._leaves()
        self._types()
        self._counts()
        self.bad = frozenset(broken.keys[0] for broken in self.found)

    def blame(self, rule: str, key: str, message: str, *fixes: Mapping[str, Any]) -> None:
        changes = tuple(fix if isinstance(fix, Changes) else Changes(fix) for fix in fixes)
        self.found.append(Broken(rule, message, changes, (key,)))

    def _blamed(self, key: str) -> bool:
        """Whether `key`, or something that it lies in, has a finding."""
        return any(key == told or key.startswith(f"{told}.") for told in self._told())

    def _told(self) -> list[str]:
        return [key for broken in self.found for key in broken.keys]

    def _sections(self) -> None:
        for section in Config.model_fields:
            value = self.resolved.get(section)
            if isinstance(value, Mapping):
                continue
            option = "none" if section == "filter" else default_option(section)
            what = "null" if section in self.resolved and value is None else "no group of keys"
            what = what if section in self.resolved else "missing"
            self.blame("group_present", section, f"The group {section} is {what}.", {section: option})

    def _leaves(self) -> None:
        for key, value in _walk(self.resolved):
            if key.partition(".")[0] not in Config.model_fields:
                continue  # an unknown group: `key_known` says so
            if value == "???":
                self.blame("value_given", key, f"{key} has no value (???).", *self._suggest(key))
            elif value == "None":
                message = f"{key}=None is text, the word None; nothing is written null."
                fixes = [{key: None}] if nullable(key, self.resolved) else self._suggest(key)
                self.blame("value_type", key, message, *fixes)
            elif isinstance(value, float) and not math.isfinite(value):
                self.blame("numbers_finite", key, f"{key}={value} is not a finite number.", *self._suggest(key))
            elif isinstance(value, int | float) and abs(value) > LARGEST:
                told = f"{value:.3g}" if isinstance(value, float) else f"a whole number of {value.bit_length()} bits"
                message = f"{key} is {told}, beyond {LARGEST:g}: its square is no number to compute with."
                self.blame("numbers_finite", key, message, *self._suggest(key))
            elif isinstance(value, bool | float) and value in choices(key, self.resolved):
                # Python takes true for 1, and pydantic with it.
                message = f"{key}={render(value)} is {_describe(value)}; it must be a whole number."
                self.blame("value_type", key, message, {key: int(value)}, *self._suggest(key))

    def _types(self) -> None:
        candidate, trusted = _typable(self.resolved, self)
        try:
            typed = Config.model_validate(candidate)
        except ValidationError as failure:
            for detail in failure.errors(include_url=False, include_context=False):
                self._type_finding(detail)
        else:
            self.typed = typed if trusted else None

    def _type_finding(self, detail: ErrorDetails) -> None:
        key = dotted(detail["loc"])
        value, kind = lookup(self.resolved, key), detail["type"]
        if self._blamed(key) or (value is None and key in NULL_HAS_ITS_RULE):
            return
        if kind == "extra_forbidden":
            self._unknown_key(key, value)
        elif kind == "missing":
            self.blame("value_given", key, f"{key} is missing.", *self._suggest(key))
        elif kind == "literal_error":
            self.blame_choice(key, value, choices(key, self.resolved))
        else:
            wanted = _TYPES.get(kind, "another type") + (" or null" if nullable(key, self.resolved) else "")
            message = f"{key}={render(value)} is {_describe(value)}; it must be {wanted}."
            self.blame("value_type", key, message, *_converted(key, value, kind, self.resolved), *self._suggest(key))

    def blame_choice(self, key: str, value: Any, listed: list[Any]) -> None:
        """A value that is none of the listed ones, mended by the nearest."""
        best = nearest(render(value), map(render, listed))
        fixes = [{key: choice} for choice in sorted(listed, key=lambda choice: render(choice) != best)]
        self.blame("choice_known", key, f"{key}={render(value)} is none of {', '.join(map(render, listed))}.", *fixes)

    def _unknown_key(self, key: str, value: Any, top: str = "") -> None:
        """A key that the schema does not have; of an unknown group of keys, each of its values."""
        if isinstance(value, Mapping) and value:
            for name, child in value.items():
                self._unknown_key(f"{key}.{name}", child, top or key)
            return
        remove = {top or key: REMOVE}
        section, _, leaf = key.partition(".")
        owners = [name for name, model in members(section).items() if leaf in model.model_fields]
        if owners:
            chosen = f"{section}={lookup(self.resolved, f'{section}.name')}"
            having = " and ".join(f"{section}={name}" for name in owners)
            switch = [Changes({section: name}, f"in place of {chosen}") for name in owners]
            self.blame("key_known", key, f"{key} is a key of {having}, not of {chosen}.", remove, *switch)
            return
        best = _best_known(key, self.resolved)
        message = f"{key}={render(value)} is read by nothing; the nearest known key is {best}."
        as_shipped = lookup(self.resolved, best) == suggested_value(best, self.resolved)
        replace = Changes(remove | {best: value}, f"behind it; in its place without ~{top or key}")
        self.blame("key_known", key, message, *[replace] * (as_shipped and _alike(key, best)), remove)

    def blame_misnamed(self, section: str, name: str, other: str) -> None:
        """`data.name=jsonl` for `data=jsonl`: the name of one option over the keys of another."""
        message = (
            f"{section}.name={name} changes the name alone, and the keys are those of {section}={other}: an option is "
            f"chosen by {section}={name}."
        )
        self.blame("key_known", f"{section}.name", message, {section: name}, {f"{section}.name": other})

    def _counts(self) -> None:
        for key, bound in AT_LEAST.items():
            value = lookup(self.resolved, key)
            if isinstance(value, int | float) and value < bound and not self._blamed(key):
                self.blame(
                    "counts_in_range",
                    key,
                    f"{key}={render(value)} is below {bound}.",
                    {key: bound},
                    *self._suggest(key),
                )
        seed = lookup(self.resolved, "run.seed")
        if isinstance(seed, int) and seed > MAX_SEED and not self._blamed("run.seed"):
            self.blame("counts_in_range", "run.seed", f"run.seed={seed} is above {MAX_SEED}.", {"run.seed": 0})
        sizes = [
            lookup(self.resolved, f"data.{key}") for key in ("train_size", "eval_size", "min_operand", "max_operand")
        ]
        if all(type(size) is int for size in sizes) and sizes[0] >= 1 and sizes[1] >= 0:
            wrong = misfit(*sizes)
            if wrong is not None:
                self.blame("counts_in_range", "data.max_operand", wrong[0], {"data.max_operand": wrong[1]})
        self._count_samples()

    def _count_samples(self) -> None:
        """pass@k takes k of the samples, so k lies between 1 and their number."""
        asked, samples = lookup(self.resolved, "eval.k"), lookup(self.resolved, "eval.samples")
        if self._blamed("eval.samples") or any(key.startswith("eval.k") for key in self._told()) or not asked:
            return
        if min(asked) < 1:
            self.blame("counts_in_range", "eval.k", f"eval.k={render(asked)}: a k is below 1.", {"eval.k": [1]})
        elif max(asked) > samples:
            message = f"eval.k={render(asked)} takes more than the eval.samples={samples}."
            self.blame("counts_in_range", "eval.k", message, {"eval.samples": max(asked)}, {"eval.k": [1]})

    def _suggest(self, key: str) -> list[dict[str, Any]]:
        return [{key: suggested_value(key, self.resolved)}]


def _best_known(key: str, resolved: Mapping[str, Any]) -> str:
    """The known key that is most like an unknown one; one of the same last name in another group before all others."""
    known = list(known_keys(resolved))
    same = [other for other in known if _leaf(other) == _leaf(key)]
    return nearest(key, same or known) or ""


def _alike(key: str, other: str) -> bool:
    """Whether two keys differ by a slip only, so that one may have been meant by the other."""
    return SequenceMatcher(None, _leaf(key), _leaf(other)).ratio() >= 0.6


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _typable(resolved: Mapping[str, Any], shape: Shape) -> tuple[dict[str, Any], bool]:
    """A copy that can be typed as far as possible, and whether what it types to is the config that was asked.

    A wrong `name` would hide all other findings of its group, so it is reported here and replaced. Reward terms of an
    unknown name have a rule of their own and are replaced likewise; keys that name code are left out.
    """
    copy = _without_callables(resolved)
    trusted = copy == resolved
    for section in Config.model_fields:
        options, values = members(section), copy.get(section)
        if options and isinstance(values, dict) and "name" in values and values["name"] not in list(options):
            if values["name"] != "???":
                shape.blame_choice(f"{section}.name", values["name"], list(options))
            copy[section] = values | {"name": tag(closest_member(options, values))}
        elif options and isinstance(values, dict) and (other := misnamed(section, values)):
            shape.blame_misnamed(section, values["name"], other)
            copy[section] = values | {"name": other}
    reward = copy.get("reward")
    if isinstance(reward, dict) and isinstance(reward.get("terms"), list):
        known = term_models()
        reward["terms"] = [_without_open_pattern(term) for term in reward["terms"]]
        for index, term in enumerate(reward["terms"]):
            if isinstance(term, dict) and term.get("name") not in list(known):
                trusted = False
                _blame_term_name(term, f"reward.terms.{index}.name", shape)
                reward["terms"][index] = {"name": "exact"} | {key: term[key] for key in term if key == "weight"}
    return copy, trusted


def _without_open_pattern(term: Any) -> Any:
    """A regex term whose pattern is still ???, which is told as such and is no pattern."""
    if isinstance(term, dict) and term.get("pattern") == "???":
        return term | {"pattern": ""}
    return term


def _blame_term_name(term: Mapping[str, Any], key: str, shape: Shape) -> None:
    """A term without a name, or whose name is no text; a name that no term has is left to `reward_term_known`."""
    if "name" not in term:
        shape.blame("value_given", key, f"{key} is missing.", {key: "exact"})
    elif not isinstance(term["name"], str):
        message = f"{key}={render(term['name'])} is {_describe(term['name'])}; it must be text."
        shape.blame("value_type", key, message, {key: "exact"})


def _without_callables(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_callables(child) for key, child in value.items() if key not in CALLABLE_KEYS}
    return [_without_callables(child) for child in value] if isinstance(value, list) else value


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a plain config with its dotted key."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for name, child in items:
        yield from _walk(child, f"{path}.{name}" if path else str(name))


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a truth value", int: "a whole number", float: "a number with a fraction", str: "text"}
    return kinds.get(type(value), "a list" if isinstance(value, list) else "a group of keys")


def _converted(key: str, value: Any, kind: str, resolved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The value in the type that is wanted, where it plainly means one."""
    if isinstance(value, str) and value.strip().lower() in ("none", "null", "") and nullable(key, resolved):
        return [{key: None}]
    try:
        if kind in ("int_type", "int_from_float") and isinstance(value, str | float):
            return [{key: int(float(value))}]
        if kind == "float_type" and isinstance(value, str):
            return [{key: float(value)}] if math.isfinite(float(value)) else []
    except (ValueError, OverflowError):
        return []
    if kind == "bool_type" and str(value).lower() in ("true", "false", "yes", "no", "on", "off", "0", "1"):
        return [{key: str(value).lower() in ("true", "yes", "on", "1")}]
    if kind == "string_type" and isinstance(value, int | float):
        return [{key: render(value)}]
    if isinstance(value, str) and value in term_models() and key.startswith("reward.terms"):
        term = {"name": value, "weight": 1.0}
        return [{key: [term] if kind == "list_type" else term}]
    if kind == "list_type" and isinstance(value, str | int | float | Mapping):
        return [{key: [value]}]
    return []


TOPIC = "shape"
declare(
    "override_parses", "error", TOPIC, "compose",
    why="""An override is not in Hydra's grammar, or it is a list of values without -m. A bare `#`, `=` or comma changes
    or splits the value. Quote the value as the message shows, or add -m.""",
)  # fmt: skip
declare(
    "option_known", "error", TOPIC, "compose",
    why="""A group choice (loss=..., experiment=...) is not an option of its group. Composition would stop at the first
    one, with a traceback and no key. Use the nearest option, which the message names.""",
)  # fmt: skip
declare(
    "config_composes", "error", TOPIC, "compose",
    why="""Two options for one group, two experiments, a swept key given twice, or an experiment file without
    `override` or `# @package _global_`. The last one would win silently, or values would land where nobody reads
    them. Keep one; write the line that the message shows.""",
)  # fmt: skip
declare(
    "group_present", "error", TOPIC, "config",
    why="""A config group is deleted or null. Everything that reads it would fail later, one by one. Choose its `none`
    option, for example filter=none.""",
)  # fmt: skip
declare(
    "key_known", "error", TOPIC, "config",
    why="""A key is not in the schema of the chosen option, also behind + or ++. A misspelt key would be accepted, read
    by nobody, and the default would train. Use the nearest known key, or the option that has it.""",
)  # fmt: skip
declare(
    "value_given", "error", TOPIC, "config",
    why="""A value is ???, or an entry lacks a required key (name and weight of a reward term). It would crash when it
    is first read, often after the weights are loaded. Give the key a value.""",
)  # fmt: skip
declare(
    "value_type", "error", TOPIC, "config",
    why="""A value has not the schema's type: true is no whole number, 2.5 is no count, "4" and the word None are text.
    Such values would reach the trainer and act as something else. Write the type that the message names; null means
    nothing.""",
)  # fmt: skip
declare(
    "choice_known", "error", TOPIC, "config",
    why="""An enumerated value is not one of the listed ones. It would fall into a default branch, or crash at the
    first loss. Use one of the listed values.""",
)  # fmt: skip
declare(
    "numbers_finite", "error", TOPIC, "config",
    why="""A number is nan, infinite or beyond 1e60. Every comparison with nan is false, so range checks and filters
    would pass silently; squares of huge numbers overflow. Write a finite number.""",
)  # fmt: skip
declare(
    "interpolation_resolves", "error", TOPIC, "compose",
    why="""An interpolation ${...} has no target. It would surface only when it is read, possibly after the model is
    loaded. Name an existing key, or write the value.""",
)  # fmt: skip
declare(
    "counts_in_range", "error", TOPIC, "config", *AT_LEAST,
    why="""A count is below its bound: 1 for sizes, lengths and intervals, 0 for trainer.warmup_steps,
    rollout.max_staleness, data.eval_size and run.seed (which ends at 2**63 - 1). It would make empty batches, a
    division by zero, or a run of no steps that exits 0. Raise the count to the bound in the message.""",
)  # fmt: skip
