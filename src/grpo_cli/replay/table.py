"""What `grpo replay` shows a person: a row a group, the totals, and a sentence on why the loss is what it is."""

from __future__ import annotations

import math
from collections import Counter

from rich.console import Console
from rich.table import Table

from grpo_cli.replay.recompute import GroupResult, Replayed
from grpo_cli.stats import total
from grpo_cli.terminal.parser import one_line

MAX_ADVANTAGES = 8
PIPED_WIDTH = 120


def print_table(replayed: Replayed, console: Console | None = None) -> None:
    """Prints the replay to `console`, standard output unless given."""
    if console is None:
        console = Console(highlight=False, markup=False, emoji=False)  # a name is no command to the terminal
        if not console.is_terminal:
            console.width = PIPED_WIDTH
    table = Table("group", "reward", "dropped", "advantages", "clipped", "loss", box=None, pad_edge=False)
    for column in (1, 4, 5):
        table.columns[column].justify = "right"
    for result in replayed.groups:
        table.add_row(*_row(result, replayed.per_token))
    console.print(table)
    console.print()
    console.print(summary(replayed))


def summary(replayed: Replayed) -> str:
    """Totals, and why: a loss of 0 is healthy on the policy's own samples and says nothing about the gradient."""
    reasons = Counter(result.group.dropped for result in replayed.groups if result.group.dropped)
    kept = sum(not result.group.dropped for result in replayed.groups)
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "none"
    norm = math.sqrt(total([g * g for result in replayed.groups for row in result.token_grad for g in row]))
    lines = [
        f"groups   {replayed.metrics['groups/trained_count']:.0f} trained, {sum(reasons.values())} dropped ({told})",
        f"tokens   {replayed.metrics['loss/tokens_count']:.0f} trained",
        f"loss     {replayed.loss:.6g}",
        f"gradient {norm:.6g} (norm over the logprobs of all tokens)",
        *(f"{key:<8} {replayed.metrics[key]:.6g}" for key in ("kl",) if key in replayed.metrics),
        _why(replayed, kept, norm),
    ]
    return "\n".join(line for line in lines if line)


def _why(replayed: Replayed, kept: int, norm: float) -> str:
    if not kept:
        return "Every group was dropped: nothing would be trained in this step."
    if not replayed.metrics["loss/tokens_count"]:
        return "No token is trained: all completions of the kept groups are empty, unscored or masked."
    if norm == 0:
        return "The gradient is exactly 0: no trained token has an advantage, or the clip stopped all of them."
    if abs(replayed.loss) < 1e-6:
        return "The loss is near 0 because the advantages cancel at ratio 1; the gradient does not."
    return ""


def _row(result: GroupResult, per_token: bool) -> list[str]:
    group = result.group
    return [
        one_line(group.group_id),
        _rewards([completion.reward for completion in group.completions]),
        group.dropped or "",
        "" if group.dropped else _advantages(result, per_token),
        _clipped(result.metrics),
        f"{result.loss:.4g}",
    ]


def _rewards(rewards: list[float | None]) -> str:
    scored = [reward for reward in rewards if reward is not None]
    missing = f" ({len(rewards) - len(scored)} unscored)" if len(scored) < len(rewards) else ""
    if not scored:
        return f"-{missing}"
    return f"{math.fsum(scored) / len(scored):.3g} [{min(scored):.3g}, {max(scored):.3g}]{missing}"


def _advantages(result: GroupResult, per_token: bool) -> str:
    """The advantages of a few completions one by one, of many their range; for per-token ones the mean of each."""
    if per_token:
        values = [total(row) / len(row) if row else 0.0 for row in result.token_advantages]
    else:
        values = [completion.advantage or 0.0 for completion in result.group.completions]
    if len(values) > MAX_ADVANTAGES:
        return f"{min(values):+.2f} to {max(values):+.2f}, {len(values)} completions"
    return " ".join(f"{value:+.2f}" for value in values)


def _clipped(metrics: dict[str, float]) -> str:
    sides = [(side, metrics.get(f"clip_frac/{side}")) for side in ("low", "high", "dual")]
    return " ".join(f"{side} {share:.0%}" for side, share in sides if share is not None)
