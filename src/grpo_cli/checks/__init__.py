"""Every mistake that can be known from the config, found before anything exists: `check` and `explain`.

No weight, tokenizer, data row, process or network is touched: beside the config only the path in `trainer.resume` and
the key of W&B are looked at. `checks.start` has what needs more, still before weights are loaded.
"""

from __future__ import annotations

from grpo_cli.checks.engine import RULES, Rule
from grpo_cli.checks.run import check, explain, in_order

__all__ = ["RULES", "Rule", "check", "explain", "in_order"]
