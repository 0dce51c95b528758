"""`grpo replay`: filter, advantage and loss recomputed on dumped rollouts under any config; no model, no data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_cli import advantage
from grpo_cli.compose import load
from grpo_cli.errors import EXIT_OK, ConfigError, Finding
from grpo_cli.files.jsonio import dumps
from grpo_cli.filter import make_filter
from grpo_cli.loss import Measures, Tokens, policy_loss, prepare
from grpo_cli.masks import trained
from grpo_cli.metrics import group_metrics
from grpo_cli.options import nearest
from grpo_cli.passes import decide_passes
from grpo_cli.replay.dump import FIX, RULE, Row, parse_groups, raise_findings, read_file, term_names
from grpo_cli.schema import Config
from grpo_cli.shaping import shape
from grpo_cli.stats import total
from grpo_cli.terminal.parser import Parser, show
from grpo_cli.terminal.usage import composition
from grpo_cli.types import Completion, Group


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What one group came to: its share of the loss, and what its tokens met there."""

    group: Group
    token_advantages: list[list[float]]
    token_grad: list[list[float]]
    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Replayed:
    """One optimizer step over all groups of a dump."""

    groups: list[GroupResult]
    per_token: bool
    """Whether the estimator's advantages are per token (whitened)."""
    loss: float
    metrics: dict[str, float]
    warnings: list[Finding]

    def as_json(self) -> dict[str, Any]:
        """What `grpo replay --json` prints."""
        return {
            "groups": [
                {
                    "group_id": result.group.group_id,
                    "dropped": result.group.dropped,
                    "advantages": None if self.per_token else [c.advantage for c in result.group.completions],
                    "token_advantages": result.token_advantages if self.per_token else None,
                }
                for result in self.groups
            ],
            "loss": self.loss,
            "token_grad": [result.token_grad for result in self.groups],
            "metrics": self.metrics,
        }


def replay(overrides: list[str], groups: list[dict]) -> dict[str, Any]:
    """Filter, advantage, loss and its gradient of dumped groups under the default config with `overrides`.

    Args:
        overrides: as on the command line, for example `["loss=gspo", "trainer.epochs_per_step=2"]`.
        groups: groups in the form of a rollout dump; all of them are one optimizer step. They are left as they are.

    Returns:
        What `grpo replay --json` prints, as plain JSON values. Warnings go to standard error.

    Raises ConfigError for a config or a group that leaves a number undefined.
    """
    replayed = run(overrides, [Row(f"groups[{index}]", group) for index, group in enumerate(groups)])
    show(replayed.warnings)
    return replayed.as_json()


def run(overrides: Sequence[str], rows: list[Row], config_dir: Path | None = None) -> Replayed:
    """The replay of a dump's rows, all of them one optimizer step, in float64; arguments and errors as for `replay`."""
    groups, names = parse_groups(rows), term_names(rows)
    cfg, warnings = _load(overrides, rows, config_dir)
    weights = {name: (cfg.replay.weights or {}).get(name, 1.0) for name in names}
    for group in groups:
        for completion in group.completions:
            shape(completion, weights, cfg.reward.overlong)
            completion.advantage = 0.0
    kept, dropped = make_filter(cfg).split(groups)
    advantage.assign(kept, cfg, weights)

    needs = _needs(cfg)
    raise_findings([one for row, group in zip(rows, groups, strict=True) for one in _missing(row, group, needs, cfg)])
    batches = [_batch(group, cfg) for group in groups]
    metrics = prepare([[batch.tokens for batch in batches]], cfg, lambda tensor: tensor)
    results, measures = _differentiate(groups, batches, cfg)
    loss = total([result.loss for result in results])
    return Replayed(
        groups=results,
        per_token=cfg.whitens_advantage,
        loss=loss,
        metrics=group_metrics(groups, kept, dropped, cfg) | metrics | measures.result() | {"loss": loss},
        warnings=warnings + _stand_ins(groups, cfg),
    )


def _load(overrides: Sequence[str], rows: list[Row], config_dir: Path | None) -> tuple[Config, list[Finding]]:
    """The config, and what `replay` says about it without refusing it."""
    names = term_names(rows)
    loaded = load(overrides, "replay", config_dir, terms=names)
    findings = loaded.findings
    if loaded.config is not None:
        unknown = [name for name in loaded.config.replay.weights or {} if name not in names]
        findings = [*findings, *(_unknown_term(name, names, rows[0].where) for name in unknown)]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors or loaded.config is None:
        raise ConfigError(findings)
    return loaded.config, findings


def _unknown_term(name: str, names: list[str], where: str) -> Finding:
    known = ", ".join(names) or "no term"
    message = f"{where}: completions[0].rewards holds {known}; replay.weights names {name}, expected one of those."
    return Finding("replay_weights_known", ("replay.weights",), message, f"use {nearest(name, names) or 'no weight'}")


# --- which lists of the dump are read ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """A token list that the config reads, and why; the rule and the fix of a dump that does not have it."""

    why: str
    rule: str = RULE
    keys: tuple[str, ...] = ()
    fix: str = FIX


def _needs(cfg: Config) -> dict[str, Need]:
    """The lists that every trained completion must have. Old logprobs are no need: the current ones can stand in."""
    loss = cfg.loss
    needs = {"logprobs": Need("and old_logprobs and sampler_logprobs are too: one of the three is needed")}
    reference = decide_passes(cfg).reference
    if reference.runs:
        needs["ref_logprobs"] = Need(
            f"but needed: {reference.reason.rstrip('.')}", keys=("loss.kl_coef",), fix="loss.kl_coef=0"
        )
    if loss.correction.mode != "none" or loss.seq_logprob_error_threshold is not None:
        needs["sampler_logprobs"] = Need(
            f"but needed: loss.correction.mode={loss.correction.mode} and "
            f"loss.seq_logprob_error_threshold={loss.seq_logprob_error_threshold} read it",
            rule="correction_needs_sampler_logprobs",
            keys=("loss.correction.mode", "loss.seq_logprob_error_threshold"),
            fix="loss.correction.mode=none loss.correction.low=null loss.correction.high=null "
            "loss.seq_logprob_error_threshold=null",
        )
    if loss.top_entropy_quantile < 1 or loss.entropy_coef != 0:
        needs["entropies"] = Need(
            f"but needed: loss.top_entropy_quantile={loss.top_entropy_quantile:g} and "
            f"loss.entropy_coef={loss.entropy_coef:g} read it",
            keys=("loss.top_entropy_quantile", "loss.entropy_coef"),
            fix="loss.top_entropy_quantile=1.0 loss.entropy_coef=0.0",
        )
    return needs


def _missing(row: Row, group: Group, needs: dict[str, Need], cfg: Config) -> list[Finding]:
    """Needed lists that a trained completion of this group does not have."""
    return [
        Finding(need.rule, need.keys, f"{row.where}: completions[{index}].{name} is null, {need.why}.", need.fix)
        for index, (completion, is_trained) in enumerate(zip(group.completions, trained(group, cfg), strict=True))
        if is_trained
        for name, need in needs.items()
        if (_current(completion) if name == "logprobs" else getattr(completion, name)) is None
    ]


def _current(completion: Completion) -> list[float] | None:
    """The current policy's logprobs: `logprobs`, where null `old_logprobs`, then `sampler_logprobs`."""
    lists = (completion.logprobs, completion.old_logprobs, completion.sampler_logprobs)
    return next((values for values in lists if values is not None), None)


def _stand_ins(groups: list[Group], cfg: Config) -> list[Finding]:
    """A warning where old logprobs are needed, the dump has none, and the detached current ones stand for them."""
    old = decide_passes(cfg).old
    count = sum(
        is_trained and completion.old_logprobs is None
        for group in groups
        for completion, is_trained in zip(group.completions, trained(group, cfg), strict=True)
    )
    if not old.runs or not count:
        return []
    message = (
        f"old_logprobs of {count} trained completion{'s' * (count > 1)} are null, but needed: {old.reason} "
        "The detached logprobs stand for them, so their ratio is 1."
    )
    return [Finding("replay_old_logprobs_given", (), message, "a dump of a run whose old pass ran", "warning")]


# --- tensors, loss and gradient ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """A group's completion tokens, end to end, in float64."""

    tokens: Tokens
    current_T: Tensor
    """[T] current logprobs: the leaf that the gradient is taken of."""
    entropy_T: Tensor | None


def _batch(group: Group, cfg: Config) -> Batch:
    """A group as one micro-batch of the loss."""
    completions, is_trained = group.completions, trained(group, cfg)
    passes = decide_passes(cfg)
    lengths = [len(completion.token_ids) for completion in completions]
    current = [_current(completion) for completion in completions]
    old = [now if c.old_logprobs is None else c.old_logprobs for c, now in zip(completions, current, strict=True)]
    sampled = all(c.sampler_logprobs is not None for c, used in zip(completions, is_trained, strict=True) if used)
    entropies = _flat([c.entropies for c in completions], lengths) if "entropies" in _needs(cfg) else None
    tokens = Tokens(
        seq_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        length_N=torch.tensor(lengths),
        trained_N=torch.tensor(is_trained),
        advantage_N=torch.tensor([c.advantage for c in completions], dtype=torch.float64),
        sampler_T=_flat([c.sampler_logprobs for c in completions], lengths) if sampled else None,
        old_T=_flat(old, lengths) if passes.old.runs else None,
        ref_T=_flat([c.ref_logprobs for c in completions], lengths) if passes.reference.runs else None,
        entropy_T=entropies,
    )
    return Batch(tokens, _flat(current, lengths).requires_grad_(), entropies)


def _flat(lists: Sequence[list[float] | None], lengths: list[int]) -> Tensor:
    """[T] the lists end to end. A null one belongs to an untrained completion: NaN, so that reading it would show."""
    filled = [[math.nan] * length if values is None else values for values, length in zip(lists, lengths, strict=True)]
    return torch.tensor([value for values in filled for value in values], dtype=torch.float64)


def _differentiate(groups: list[Group], batches: list[Batch], cfg: Config) -> tuple[list[GroupResult], Measures]:
    """Loss and gradient of each group's share of the update, and the measures of all of them."""
    results, everything = [], Measures()
    for group, batch in zip(groups, batches, strict=True):
        loss, measures = policy_loss(batch.current_T, batch.entropy_T, batch.tokens, cfg)
        (grad_T,) = torch.autograd.grad(loss, [batch.current_T])
        assert batch.tokens.advantage_T is not None, "prepare() has run"
        lengths = batch.tokens.length_N.tolist()
        results.append(
            GroupResult(
                group=group,
                token_advantages=_split(batch.tokens.advantage_T, lengths),
                token_grad=_split(grad_T, lengths),
                loss=loss.item(),
                metrics=measures.result(),
            )
        )
        everything.merge(measures)
    return results, everything


def _split(values_T: Tensor, lengths: list[int]) -> list[list[float]]:
    return [part.tolist() for part in values_T.split(lengths)]


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """`grpo replay FILE [--json] [OVERRIDE ...]`; exit code 2 for a file or config that leaves a number undefined."""
    parser = Parser("replay", "Recomputes filter, advantage and loss on dumped rollouts; loads no model.", composition)
    parser.add_argument("file", type=Path, metavar="FILE", help="a rollout dump, RUN_DIR/rollouts/step_N.jsonl")
    parser.add_argument("--json", action="store_true", help="print everything, token gradients too, as JSON")
    parser.add_overrides()
    asked = parser.read(arguments)
    replayed = run(asked.overrides, read_file(asked.file), asked.config_dir)
    show(replayed.warnings)
    if asked.json:
        print(dumps(replayed.as_json()))
    else:
        from grpo_cli.replay.table import print_table

        print_table(replayed)
    return EXIT_OK
