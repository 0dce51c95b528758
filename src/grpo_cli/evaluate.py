"""Held-out accuracy, avg@n and pass@k: of a run while it trains, and of any model with `grpo eval`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import EXIT_OK, ConfigError, Finding
from grpo_cli.process.signals import Interrupted
from grpo_cli.rollout.sampling import Sampling
from grpo_cli.schema import Config
from grpo_cli.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from grpo_cli.process.ranks import Ranks
    from grpo_cli.rollout import Rollout

RESULT = "eval.json"
"""File of the metrics in the directory of an evaluation."""

GENERATED_DATA = ("arithmetic", "reasoning_gym")
"""Data that make their own held-out rows."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one prompt's samples were worth; small enough to be gathered from every rank.

    >>> Outcome(correct=[True, False], rewards=[1.0, None], tokens=[3, 24], truncated=[False, True])
    """

    correct: list[bool]
    rewards: list[float | None]
    """Unshaped reward of each sample; None where it could not be scored."""
    tokens: list[int]
    truncated: list[bool]


def main(arguments: Sequence[str]) -> int:
    """`grpo eval`: evaluates `model.path` on the held-out problems in RUN_DIR/eval, and prints what it found."""
    from grpo_cli.compose import load  # not at the top: workers import this module, and never Hydra
    from grpo_cli.terminal.parser import Parser, show
    from grpo_cli.terminal.usage import composition

    parser = Parser("eval", "Samples a model on held-out problems: accuracy, avg@n and pass@k.", composition)
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    parser.add_overrides()
    asked = parser.read(arguments)
    loaded = load(asked.overrides, "eval", asked.config_dir)
    show(loaded.warnings)
    cfg = loaded.require()
    if cfg.data.eval is None and cfg.data.name not in GENERATED_DATA:
        message = f"data={cfg.data.name} has no held-out rows: data.eval is null."
        raise ConfigError(Finding("eval_needs_data", ("data.eval",), message, "data.eval=FILE"))
    from grpo_cli.checks import start
    from grpo_cli.launch import launch

    found = start.check(cfg, "eval")
    show(finding for finding in found if finding.severity == "warning")
    if errors := [finding for finding in found if finding.severity == "error"]:
        raise ConfigError(errors)
    assert loaded.resolved is not None
    directory = Path(cfg.run.dir) / "eval"
    (directory / RESULT).unlink(missing_ok=True)  # an older answer is none to this question
    code = launch(loaded.resolved, directory, worker="grpo_cli.eval_worker")
    if code == EXIT_OK:
        metrics = json.loads((directory / RESULT).read_text(encoding="utf-8"))
        print(json.dumps(metrics, indent=2) if asked.json else table(cfg, metrics))
    return code


def table(cfg: Config, metrics: dict[str, float]) -> str:
    """The headline, then a line a metric."""
    lines = [f"{key:<24} {value:.4g}" for key, value in metrics.items()]
    return "\n".join([headline(cfg, metrics) + f": {cfg.model.path}", *lines])


def due(cfg: Config, step: int, is_last: bool) -> bool:
    """Whether the policy is evaluated after `step` steps: before the first, every `eval_every`, after the last."""
    every = cfg.trainer.eval_every
    return every is not None and (step % every == 0 or is_last)


def evaluate(
    cfg: Config, prompts: Sequence[Prompt], rollout: Rollout, scorer: Any, ranks: Ranks, step: int, version: int
) -> dict[str, float]:
    """Sample and score the held-out `prompts`, each rank its share; the same metrics on every rank.

    Every prompt draws the same random numbers at every step, so that two evaluations differ by the policy alone. The
    overlong penalty stays out. Empty, on all ranks, where a signal reached one of them in the middle of it: the loop
    finds the signal itself. Raises what the rollout and the scorer raise.
    """
    start = time.perf_counter()
    numbered = [(f"eval-{index}", prompt) for index, prompt in enumerate(prompts)]
    mine = numbered[ranks.rank :: ranks.world]
    share: list[Outcome] | None
    try:
        groups = rollout.generate(mine, step, version, Sampling.of_eval(cfg))
        # As many at a time as in training: that is what reward.timeout_s and a reward's memory are meant for.
        size = max(1, cfg.sequences_per_step // (cfg.eval.samples * ranks.world))
        chunks = [groups[first : first + size] for first in range(0, len(groups), size)]
        share = [_outcome(group, cfg) for chunk in chunks for group in scorer.score(chunk)]
    except Interrupted:
        share = None
    scorer.metrics()  # its counts are of the step's rollouts; here unscored completions are counted by themselves
    shares = ranks.gather(share)
    if None in shares:
        return {}
    outcomes = [outcome for share in shares for outcome in share]
    return {**measures(outcomes, cfg.eval.samples, cfg.eval.k), "time/eval": time.perf_counter() - start}


def measures(outcomes: Sequence[Outcome], samples: int, ks: Sequence[int]) -> dict[str, float]:
    """The `eval/*` metrics of all prompts: means over prompts of each prompt's own estimate. Empty without prompts."""
    if not outcomes:
        return {}
    correct = [sum(outcome.correct) for outcome in outcomes]
    completions = [
        sample
        for outcome in outcomes
        for sample in zip(outcome.rewards, outcome.tokens, outcome.truncated, strict=True)
    ]
    rewards = [reward for reward, _, _ in completions if reward is not None]
    accuracy = {
        f"eval/avg@{samples}": _mean([count / samples for count in correct]),
        **{f"eval/pass@{k}": _mean([pass_at_k(samples, count, k) for count in correct]) for k in ks},
    }
    metrics = {
        **(accuracy if rewards else {}),  # nothing was measured where nothing could be scored
        "eval/tokens_mean": _mean([float(tokens) for _, tokens, _ in completions]),
        "eval/truncated_frac": _mean([float(truncated) for _, _, truncated in completions]),
        "eval/prompts_count": float(len(outcomes)),
        "eval/unscored_count": float(len(completions) - len(rewards)),
    }
    if rewards:
        metrics["eval/reward"] = _mean(rewards)
    return metrics


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct, from `correct` of `samples`.

    1 - C(n - c, k) / C(n, k), arXiv 2107.03374, equation 1; the plain 1 - (1 - c/n)^k is biased upwards for k < n.
    """
    assert 0 < k <= samples, f"pass@{k} of {samples} samples"
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def is_correct(completion: Completion, full_marks: float) -> bool:
    """Whether the unshaped reward reaches full marks; what could not be scored is not correct."""
    return completion.unshaped is not None and completion.unshaped >= full_marks - 1e-9


def full_marks(cfg: Config) -> float:
    """The unshaped reward of an answer that every term of positive weight gives 1."""
    return sum(term.weight for term in cfg.reward.terms if term.weight > 0)


def headline(cfg: Config, metrics: dict[str, float]) -> str:
    """One line for a person.

    >>> headline(cfg, {"eval/avg@1": 0.86, "eval/prompts_count": 100.0, ...})
    '86 % of 100 held-out problems correct (greedy)'
    """
    how = "greedy" if cfg.eval.temperature == 0 else f"{cfg.eval.samples} samples each at {cfg.eval.temperature:g}"
    share = metrics.get(f"eval/avg@{cfg.eval.samples}")
    if share is None:
        unscored = metrics.get("eval/unscored_count", 0)
        told = f": none of {unscored:.0f} completions could be scored" if unscored else ""
        return f"no held-out problem was evaluated{told}"
    return f"{100 * share:.3g} % of {metrics['eval/prompts_count']:.0f} held-out problems correct ({how})"


def _outcome(group: Group, cfg: Config) -> Outcome:
    marks = full_marks(cfg)
    return Outcome(
        correct=[is_correct(completion, marks) for completion in group.completions],
        rewards=[completion.unshaped for completion in group.completions],
        tokens=[len(completion.token_ids) for completion in group.completions],
        truncated=[completion.finish_reason == "length" for completion in group.completions],
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
