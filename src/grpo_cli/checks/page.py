"""docs/rules.md, written from the rules themselves: `python -m grpo_cli.checks.page > docs/rules.md`."""

from __future__ import annotations

from grpo_cli.checks import RULES
from grpo_cli.checks.engine import Rule

TITLES = {
    "shape": "Shape of the config",
    "batch": "Batch arithmetic",
    "rollout": "Rollout and sampling",
    "filter": "Filter",
    "advantage": "Advantage",
    "loss": "Loss, ratio and clip",
    "kl": "KL and logprob passes",
    "correction": "Rollout correction and off-policy",
    "reward": "Reward",
    "data": "Data",
    "trainer": "Trainer and DeepSpeed",
    "model": "Model and LoRA",
    "engines": "Engines and weight sync",
    "logging": "Logging and run directory",
    "security": "Security",
    "beyond": "Several nodes, single commands and optional packages",
}

HEAD = """# Rules of `grpo validate`

Written by `python -m grpo_cli.checks.page`; a test fails when this page and the rules differ.

* An **error** ends the command with exit code 2: the run would crash, hang, or train something other than was asked.
  A **warning** is printed and the run goes on.
* All findings are listed at once, in the order of this page. `grpo validate --explain RULE` prints one rule.
* The **fix** of a finding holds overrides to paste. Alternatives are separated by `, or `; the overrides of one
  alternative are separated by spaces and go together; words in round brackets explain it. Each alternative has been
  tried on the config in question: the finding is gone, and no new error has come.
* A rule that reads a key whose shape is wrong is not run: one mistake is one finding.
* Found **at run start** means: by `grpo train` before weights are loaded, those on data and rewards also by
  `grpo validate --data`.
"""

FOUND = {"compose": "while composing", "config": "from the config", "start": "at run start"}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for topic, title in TITLES.items():
        rows = [_row(rule) for rule in RULES.values() if rule.topic == topic]
        parts.append(f"## {title}\n\n| rule | severity | found | keys | why |\n|---|---|---|---|---|\n" + "".join(rows))
    return "\n".join(parts)


def _row(rule: Rule) -> str:
    keys = ", ".join(f"`{key}`" for key in rule.keys) or "any"
    why = " ".join(rule.why.split()).replace("|", "\\|")
    return f"| `{rule.id}` | {rule.severity} | {FOUND[rule.when]} | {keys} | {why} |\n"


if __name__ == "__main__":
    print(page(), end="")
