"""Term `reasoning_gym`: the task's own `score_answer`, 0 to 1. Runs in a worker: some tasks evaluate the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from grpo_cli.reward.formulas import narrow


def make(options: Mapping[str, Any]) -> Callable[[tuple[dict[str, Any], str]], list[float | None]]:
    """The grader of (row, completion); the row names its task in `metadata.source_dataset`."""
    _package()  # the slow import belongs to the start
    return lambda request: [grade(*request)]


def grade(row: Mapping[str, Any], text: str) -> float | None:
    """The score of the last `<answer>` tag's content, or of the whole completion; None when the task fails on it."""
    gym = _package()
    answer = gym.utils.extract_answer(text)
    try:
        return float(gym.get_score_answer_fn(source(row))(answer if answer is not None else text.strip(), row))
    except Exception:  # the task's parser met something that it did not expect: no wrong answer, not scored
        return None


@cache
def _package() -> Any:
    """reasoning_gym, whose tasks evaluate an answer as a value or a formula, and never run it."""
    import reasoning_gym.utils

    narrow("reasoning_gym")
    return reasoning_gym


def source(row: Mapping[str, Any]) -> str | None:
    """The task that made a row; None when it was not made by reasoning-gym."""
    metadata = row.get("metadata")
    return metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
