"""How each kind of term is run: in place, or by a pool of workers, a completion or a group at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.reward import exact, number
from grpo_cli.reward.pool import Failure, Job, Pool
from grpo_cli.reward.python import BUILT_IN, Signature, read_signature
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


class PerGroup:
    """A user's function: one call a group, so that it may compare completions and a failure costs no other group."""

    def __init__(self, pool: Pool, signature: Signature, prompt_key: str):
        self._pool = pool
        self._signature = signature
        self._prompt_key = prompt_key

    def score(self, groups: Sequence[Group]) -> list[list[Outcome]]:
        """One outcome a completion, group by group; a failure stands for each completion of its group."""
        replies = self._pool.run([self._request(group) for group in groups])
        return [
            [reply] * len(group.completions) if isinstance(reply, Failure) else list(reply)
            for group, reply in zip(groups, replies, strict=True)
        ]

    def close(self) -> None:
        self._pool.close()

    def _request(self, group: Group) -> tuple[dict[str, list[Any]], int]:
        prompt, count = group.prompt, len(group.completions)
        built_in = {
            "prompts": [prompt.row.get(self._prompt_key, prompt.text)] * count,
            "completions": [completion.text for completion in group.completions],
            "answer": [prompt.answer] * count,
            "completion_ids": [completion.token_ids for completion in group.completions],
        }
        columns = {name: [value] * count for name, value in prompt.row.items() if name not in BUILT_IN}
        available: dict[str, list[Any]] = {**columns, **built_in}
        wanted = {name: available[name] for name in self._signature.wanted(list(available))}
        absent = {name: [None] * count for name in self._signature.required if name not in available}
        return {**wanted, **absent}, count


def make_term(term: Term, name: str, cfg: Config) -> InPlace | PerCompletion | PerGroup:
    """The runner of one term of the config. ValueError or OSError for a python term whose file cannot be read."""
    if isinstance(term, PythonTerm):
        path = str(Path(term.path).expanduser().resolve())
        signature = read_signature(path, term.function)
        options = {"path": path, "function": term.function}
        return PerGroup(_pool(name, Job("python", options, None), cfg), signature, prompt_key(cfg))
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
