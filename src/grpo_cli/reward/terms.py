"""How each kind of term is run: in place, or by a pool of workers, a completion or a whole step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_cli.reward import exact, number
from grpo_cli.reward.pool import Failure, Job, Pool
from grpo_cli.reward.python import Signature, read_signature
from grpo_cli.schema import Config, MathTerm, PythonTerm, ReasoningGymTerm, RegexTerm, Term
from grpo_cli.types import Completion, Group, Prompt

MEMORY_BYTES = 4 << 30
"""Address space of a worker that grades model text; sympy and its friends take 0.5 GB of it."""

Outcome = float | None | Failure

IN_PLACE: dict[str, Callable[[str | None, str], float | None]] = {"exact": exact.grade, "number": number.grade}


class InPlace:
    """A term that looks at two texts: cheap and harmless."""

    def __init__(self, grade: Callable[[str | None, str], float | None]):
        self._grade = grade

    def score(self, groups: Sequence[Group]) -> list[list[Outcome]]:
        """One outcome a completion, group by group."""
        return [[self._grade(group.prompt.answer, c.text) for c in group.completions] for group in groups]

    def close(self) -> None:
        """Nothing was started."""


class PerCompletion:
    """A term that grades one completion a request, in a pool."""

    def __init__(self, pool: Pool, request: Callable[[Prompt, Completion], Any]):
        self._pool = pool
        self._request = request

    def score(self, groups: Sequence[Group]) -> list[list[Outcome]]:
        """One outcome a completion, group by group."""
        replies = iter(self._pool.run([self._request(group.prompt, c) for group in groups for c in group.completions]))
        return [[_single(next(replies)) for _ in group.completions] for group in groups]

    def close(self) -> None:
        self._pool.close()


def _single(reply: list[float | None] | Failure) -> Outcome:
    return reply if isinstance(reply, Failure) else reply[0]


class Batched:
    """A user's function: one call a step (of this rank and round), or with several workers one for each worker's share.

    So it may compare completions, judge them all at once, and be given by step what a test has written down. A failure
    of the call is a failure of each of its completions.
    """

    def __init__(self, pool: Pool, signature: Signature, prompt_key: str):
        self._pool = pool
        self._signature = signature
        self._prompt_key = prompt_key

    def score(self, groups: Sequence[Group]) -> list[list[Outcome]]:
        """One outcome a completion, group by group."""
        shares = _shares(groups, self._pool.size)
        outcomes: list[list[Outcome]] = []
        for share, reply in zip(shares, self._pool.run([self._request(share) for share in shares]), strict=True):
            if isinstance(reply, Failure):
                failure = replace(reply, where=_where(share))
                outcomes += [[failure] * len(group.completions) for group in share]
            else:
                values = iter(reply)
                outcomes += [[next(values) for _ in group.completions] for group in share]
        return outcomes

    def close(self) -> None:
        self._pool.close()

    def _request(self, groups: Sequence[Group]) -> tuple[dict[str, list[Any]], int]:
        pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
        built_in: dict[str, list[Any]] = {
            "prompts": [prompt.row.get(self._prompt_key, prompt.text) for prompt, _ in pairs],
            "completions": [completion.text for _, completion in pairs],
            "answer": [prompt.answer for prompt, _ in pairs],
            "completion_ids": [completion.token_ids for _, completion in pairs],
        }
        columns = {name for group in groups for name in group.prompt.row} - set(built_in)
        wanted = self._signature.wanted(sorted(columns | set(self._signature.required) - set(built_in)))
        arguments = {name: built_in[name] for name in self._signature.wanted(list(built_in))}
        return {**{name: [prompt.row.get(name) for prompt, _ in pairs] for name in wanted}, **arguments}, len(pairs)


def _shares(groups: Sequence[Group], count: int) -> list[Sequence[Group]]:
    """`groups` cut into at most `count` runs of nearly equal length, none empty."""
    edges = [len(groups) * index // count for index in range(count + 1)]
    return [groups[start:end] for start, end in pairwise(edges) if end > start]


def _where(groups: Sequence[Group]) -> str:
    """The prompts of one call, in words."""
    first = f"prompt {groups[0].prompt.prompt_id} ({groups[0].prompt.source})"
    return first if len(groups) == 1 else f"{first} and {len(groups) - 1} more"


def make_term(term: Term, name: str, cfg: Config) -> InPlace | PerCompletion | Batched:
    """The runner of one term of the config. ValueError or OSError for a python term whose file cannot be read."""
    if isinstance(term, PythonTerm):
        path = str(Path(term.path).expanduser().resolve())
        signature = read_signature(path, term.function)
        options = {"path": path, "function": term.function}
        return Batched(_pool(name, Job("python", options, None), cfg), signature, prompt_key(cfg))
    if isinstance(term, RegexTerm):
        job = Job("regex", {"pattern": term.pattern}, MEMORY_BYTES)
        return PerCompletion(_pool(name, job, cfg), lambda prompt, completion: completion.text)
    if isinstance(term, MathTerm):
        job = Job("math", {}, MEMORY_BYTES)
        return PerCompletion(_pool(name, job, cfg), lambda prompt, completion: (prompt.answer, completion.text))
    if isinstance(term, ReasoningGymTerm):
        job = Job("reasoning_gym", {}, MEMORY_BYTES)
        return PerCompletion(_pool(name, job, cfg), lambda prompt, completion: (dict(prompt.row), completion.text))
    return InPlace(IN_PLACE[term.name])


def _pool(name: str, job: Job, cfg: Config) -> Pool:
    assert cfg.reward.timeout_s is not None, "rule reward_needs_a_time_limit"
    return Pool(name, job, cfg.reward.workers, cfg.reward.timeout_s)


def prompt_key(cfg: Config) -> str:
    """The column that holds the prompt; generated data have their own."""
    return cfg.data.prompt_key or {"reasoning_gym": "question"}.get(cfg.data.name, "prompt")
