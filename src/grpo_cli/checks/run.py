"""All rules on one config: what a command refuses, what it only says, in the order of the list of rules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_cli.checks import topics  # noqa: F401  (registers the rules)
from grpo_cli.checks.engine import RULES, Broken, Changes, Rule, View, lookup, run_rule
from grpo_cli.checks.overrides import SEPARATOR, apply, complete_fix, write
from grpo_cli.checks.shape import Shape
from grpo_cli.errors import Finding
from grpo_cli.schema import Config

RULES_OF_EVAL = (
    "temperature_positive",
    "sampling_filters_in_range",
    "sequence_fits_context",
    "stop_strings_not_empty",
    "file_keys_need_file_data",
    "value_is_read",
)
"""What `grpo eval` runs beside its topics: the range rules of the rollout, whose rows are read, and what is not."""

TOPICS_OF_EVAL = ("shape", "reward", "data", "model", "engines", "logging", "security")

REFUSED_BY_REPLAY = (
    "filter_metric_known",
    "clip_range_needs_both_bounds",
    "cispo_needs_clip_high",
    "constant_aggregation_needs_length",
    "truncate_needs_high",
    "correction_needs_sampler_logprobs",
    "advantage_eps_positive",
    "advantage_clip_positive",
    "sapo_taus_positive",
    "overlong_buffer_within_max",
    "kl_in_reward_needs_prev_logprobs",
    "no_callables_in_config",
)
"""Beside Shape: without them a number that `grpo replay` prints would be undefined, or the config have no form."""

NOT_NEEDED_BY_REPLAY = ("run.", "model.", "data.", "reward.")
"""Keys whose value `grpo replay` can do without: it has the rollouts."""

_UNREAD_BY_REPLAY = {"reward.terms": [], "model.path": "", "run.name": ""}
"""Keys that a replay does not read and whose mistakes are no findings of Shape; a value that has the right type."""

_ABOUT_CONFIGURED_TERMS = (
    "reward_terms_not_empty",
    "reward_term_known",
    "reward_term_names_unique",
    "python_reward_needs_opt_in",
    "python_reward_names_a_file",
    "answer_reward_needs_answer_key",
)
"""Rules about how a term is made; a dump holds values only."""


def check(
    resolved: Mapping[str, Any], command: str = "train", terms: Sequence[str] | None = None
) -> tuple[Config | None, list[Finding]]:
    """The typed config, and everything that is wrong with it, in the order of the list of rules.

    `resolved` is a plain dict without interpolations. The config is None where its shape does not hold. `command` is
    train, validate, plan, eval or replay; for replay, `terms` are the names of the reward terms that are stored.
    """
    config, found = _audit(resolved, command, terms)
    errors = [broken for broken in found if RULES[broken.rule].severity == "error"]
    audit = partial(_audit_pairs, command=command, terms=terms)
    findings = []
    for broken in found:
        fixes = complete_fix(resolved, broken, errors, audit)
        text = SEPARATOR.join(dict.fromkeys(write(fix, fix.note) for fix in fixes))
        keys = _first_to_change(broken.keys, fixes[0])
        finding = Finding(broken.rule, keys, broken.message, text, _severity(broken.rule, command))
        findings.append(_of_the_dump(finding, terms) if command == "replay" and terms else finding)
    return config, findings


def completed(cfg: Config, changes: Changes, command: str = "train") -> str:
    """Changes to a config that holds, written as overrides, with all that must change together with them."""
    resolved = cfg.model_dump()
    audit = partial(_audit_pairs, command=command, terms=None)
    errors = [broken for broken, is_error in audit(resolved) if is_error]
    [fix] = complete_fix(resolved, Broken("", "", (changes,)), errors, audit)
    return write(fix, fix.note)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of several sources in the order of the list of rules."""
    order = {rule: index for index, rule in enumerate(RULES)}
    return sorted(findings, key=lambda finding: order.get(finding.rule, len(order)))


def explain(rule_id: str) -> str:
    """The long reason of a rule; KeyError, with an id much like it, where there is none of that name."""
    rule = RULES.get(rule_id)
    if rule is None:
        like = difflib.get_close_matches(rule_id, RULES, n=1)
        hint = f"did you mean {like[0]}?" if like else "docs/rules.md lists them all."
        raise KeyError(f"there is no rule {rule_id}; {hint}")
    when = {"compose": "while composing", "config": "from the config", "start": "at run start, before weights"}
    keys = f"\nReads {', '.join(rule.keys)}." if rule.keys else ""
    return f"{rule.id} ({rule.severity}, found {when[rule.when]})\n\n{rule.why}\n{keys}".rstrip()


def _audit(
    resolved: Mapping[str, Any], command: str, terms: Sequence[str] | None
) -> tuple[Config | None, list[Broken]]:
    """The typed config and what is wrong, without completed fixes."""
    shape = Shape(resolved)
    bad, found, typed = shape.bad, shape.found, shape.typed
    if command == "replay":
        typed = Shape(_without_unread(resolved)).typed
        if typed is not None:
            found = [broken for broken in found if not _replay_does_without(broken)]
        resolved = _with_stored_terms(resolved, terms)
        bad = frozenset(key for key in bad if not key.startswith("reward.terms"))
    view = View(resolved, bad, command=command)
    for rule in _rules(command):
        found = found + run_rule(rule, view)
    if command == "eval" and lookup(resolved, "rollout.temperature") == 0:
        found = [broken for broken in found if broken.keys != ("rollout.temperature",)]
    order = {rule: index for index, rule in enumerate(RULES)}
    holds = all(RULES[broken.rule].topic != "shape" for broken in found)
    return typed if holds else None, sorted(found, key=lambda broken: order[broken.rule])


def _audit_pairs(resolved: Mapping[str, Any], command: str, terms: Sequence[str] | None) -> list[tuple[Broken, bool]]:
    return [(broken, RULES[broken.rule].severity == "error") for broken in _audit(resolved, command, terms)[1]]


def _rules(command: str) -> list[Rule]:
    """The rules that a command runs after Shape."""
    rules = [rule for rule in RULES.values() if rule.find is not None]
    if command == "eval":
        return [rule for rule in rules if rule.topic in TOPICS_OF_EVAL or rule.id in RULES_OF_EVAL]
    if command == "replay":
        return [rule for rule in rules if rule.id not in _ABOUT_CONFIGURED_TERMS]
    return rules


def _severity(rule: str, command: str) -> Any:
    """What a finding is for a command: `replay` refuses only what leaves its numbers undefined."""
    severity = RULES[rule].severity
    if command == "replay" and RULES[rule].topic != "shape" and rule not in REFUSED_BY_REPLAY:
        return "warning"
    return severity


def _without_unread(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The config with something that holds in place of what a replay does not read, so that the rest has a form."""
    there = {section for section, value in resolved.items() if isinstance(value, Mapping)}
    return apply(resolved, {key: v for key, v in _UNREAD_BY_REPLAY.items() if key.partition(".")[0] in there})


def _replay_does_without(broken: Broken) -> bool:
    """Whether a finding is only a ??? in a part of the config that a replay does not read."""
    left_open = broken.rule == "value_given" and broken.message.endswith("(???).")
    return left_open and broken.keys[0].startswith(NOT_NEEDED_BY_REPLAY)


def _with_stored_terms(resolved: Mapping[str, Any], terms: Sequence[str] | None) -> Mapping[str, Any]:
    """The config with the terms of the dump, weighted by `replay.weights`, in place of its own."""
    if terms is None:
        return resolved
    replay = resolved.get("replay")
    weights = (replay.get("weights") if isinstance(replay, Mapping) else None) or {}
    reward = resolved.get("reward")
    known = weights if isinstance(weights, Mapping) else {}
    stored = [{"name": name, "weight": known.get(name, 1.0)} for name in terms]
    return {**resolved, "reward": {**(reward if isinstance(reward, Mapping) else {}), "terms": stored}}


def _of_the_dump(finding: Finding, terms: Sequence[str]) -> Finding:
    """A finding of a rule about the weight of a stored term, under the key that sets it."""
    if RULES[finding.rule].topic == "shape":
        return finding

    def named(text: str) -> str:
        return re.sub(r"\breward\.terms\.(\d+)\.weight", lambda at: f"replay.weights.{terms[int(at[1])]}", text)

    keys = tuple("replay.weights" if key == "reward.terms" else key for key in finding.keys)
    return replace(finding, keys=keys, message=named(finding.message), fix=named(finding.fix))


def _first_to_change(keys: tuple[str, ...], fix: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a finding, the first one that its fix changes at the head."""
    head = next((key for key in fix if key in keys), None)
    return keys if head is None else (head, *(key for key in keys if key != head))
