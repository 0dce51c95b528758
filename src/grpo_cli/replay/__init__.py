"""`grpo replay`: filter, advantage and loss recomputed on dumped rollouts under any config; no model, no data.

`dump` reads the file strictly, `recompute` makes the numbers, `table` shows them to a person.
"""

from grpo_cli.replay.recompute import main, replay

__all__ = ["main", "replay"]
