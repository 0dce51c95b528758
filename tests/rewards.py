"""Groups and scorers for the reward tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs import make_config

from grpo_cli.reward import make_scorer
from grpo_cli.reward.scorer import Scorer
from grpo_cli.schema import Config, parse
from grpo_cli.types import Completion, Group, Prompt


def reward_config(*terms: dict, **changes) -> Config:
    """A config with these terms (weight 1 unless told) and other keys of `reward`."""
    resolved = json.loads(make_config().model_dump_json())
    resolved["reward"] |= {"terms": [{"weight": 1.0, **term} for term in terms], "timeout_s": 20.0, **changes}
    return parse(resolved)


def asked(answer: str | None, *texts: str, index: int = 0, **columns) -> Group:
    """A group of completions of one prompt, each of three tokens."""
    row = {"prompt": "What?", "answer": answer, **columns}
    prompt = Prompt(f"row-{index}", "<What?>", [1, 2], answer, row, f"d.jsonl:{index + 1}")
    return Group(f"7-{index}", prompt, [Completion(text, [1, 2, 3], "stop") for text in texts], 7, 0)


@contextmanager
def scoring(*terms: dict, **changes) -> Iterator[Scorer]:
    scorer = make_scorer(reward_config(*terms, **changes))
    try:
        yield scorer
    finally:
        scorer.close()


def python_term(folder: Path, source: str, function: str = "f", **changes) -> dict:
    """A python term whose file has this text."""
    path = folder / f"{function}_term.py"
    path.write_text(source)
    return {"name": "python", "path": str(path), "function": function, **changes}


def values(scorer: Scorer, groups: list[Group], name: str) -> list[list[float | None]]:
    """What one term gave to each completion of each group."""
    return [[completion.rewards[name] for completion in group.completions] for group in scorer.score(groups)]
