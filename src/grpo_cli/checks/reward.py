"""Rules of the reward: terms, weights, time limit and the overlong penalty."""

from __future__ import annotations

from typing import Any

from grpo_cli.checks.engine import Changes, Found, View, broken, declare, error, ge, gt, le, state, warning
from grpo_cli.checks.keys import term_models
from grpo_cli.options import nearest
from grpo_cli.schema import WHOLE_REWARD, term_names

OVERLONG = ("reward.overlong.max_tokens", "reward.overlong.buffer_tokens")


def names_code(name: str) -> bool:
    """Whether a term's name is a dotted name, a path, or a callable of a module."""
    return any(sign in name for sign in "./:")


def plain(value: Any) -> Any:
    """A part of the config as plain values, for a fix that repeats it."""
    if isinstance(value, View):
        return dict(value._values)
    return [plain(child) for child in value] if isinstance(value, list) else value


@error("reward.terms")
def reward_terms_not_empty(c: View) -> Found:
    """Without a term no completion can be scored: every group would be dropped."""
    if not c.reward.terms:
        yield broken("reward.terms is empty.", {"reward.terms": [{"name": "exact", "weight": 1.0}]})


@error("reward.terms")
def reward_term_known(c: View) -> Found:
    """A term's name is one of the built-in ones. Another would fail only when the first rollout is scored."""
    known = list(term_models())
    for index, term in enumerate(c.reward.terms):
        if isinstance(term.name, str) and term.name not in known and not names_code(term.name):
            best = nearest(term.name, known)
            key = f"reward.terms.{index}.name"
            yield broken(
                f"{state(c, key)} is none of {', '.join(known)}.",
                *({key: name} for name in sorted(known, key=lambda name: name != best)),
                keys=(key, "reward.terms"),
            )


@error("reward.terms")
def reward_term_names_unique(c: View) -> Found:
    """A term logs, filters and is stored under its name; of two terms with one name one would never count. A python
    term's name is its function, with the file's stem where two share that. A term called unshaped or total would be
    taken for the whole reward by filter.metric."""
    names = term_names(c.reward.terms)
    taken = sorted({name for name in names if names.count(name) > 1 or name in WHOLE_REWARD})
    if taken:
        apart, renamed = _told_apart(c.reward.terms, names)
        note = "rename it in its file too" if renamed else ""
        yield broken(
            f"reward.terms gives the name {' and '.join(taken)} to more than one reward: {', '.join(names)}.",
            Changes({"reward.terms": apart}, note),
        )


def _told_apart(terms: list[View], names: list[str]) -> tuple[list[Any], bool]:
    """The terms without repeated ones, a python function renamed where its name is taken; and whether one was."""
    apart: list[Any] = []
    seen: set[tuple] = set()
    taken = {*WHOLE_REWARD, *(term.name for term in terms if term.name != "python")}
    renamed = False
    for number, (term, name) in enumerate(zip(terms, names, strict=True), start=1):
        code = (term.path, term.function) if term.name == "python" else ()
        if (term.name, *code) in seen:
            continue
        seen.add((term.name, *code))
        clashes = bool(code) and name in taken
        apart.append(plain(term) | ({"function": f"{term.function}_{number}"} if clashes else {}))
        renamed = renamed or clashes
        taken.add(name)
    return apart, renamed


@error("reward.terms")
def reward_weights_not_all_zero(c: View) -> Found:
    """With weights of 0 every reward is 0: no group has signal."""
    terms = c.reward.terms
    if terms and all(term.weight == 0 for term in terms):
        weights = [f"reward.terms.{index}.weight" for index in range(len(terms))]
        yield broken(f"Every weight is 0: {state(c, *weights)}.", {weights[0]: 1.0})


@error("reward.timeout_s")
def reward_needs_a_time_limit(c: View) -> Found:
    """One pathological answer would hang the grader and all processes behind it."""
    if c.reward.timeout_s is None or c.reward.timeout_s <= 0:
        yield broken(f"{state(c, 'reward.timeout_s')} sets no time limit.", {"reward.timeout_s": 10})


@error(*OVERLONG)
def overlong_buffer_within_max(c: View) -> Found:
    """The ramp of the overlong penalty has a length above 0 and at most max_tokens. Otherwise there is a division by
    zero, or every length is penalised."""
    overlong = c.reward.overlong
    if overlong is not None and (le(overlong.buffer_tokens, 0) or gt(overlong.buffer_tokens, overlong.max_tokens)):
        longest = overlong.max_tokens if overlong.max_tokens > 0 else c.rollout.max_new_tokens
        mended = {} if longest == overlong.max_tokens else {OVERLONG[0]: longest}
        yield broken(
            f"{state(c, OVERLONG[1])} is not in 1 ... {state(c, OVERLONG[0])}.",
            {OVERLONG[1]: max(1, longest // 4)} | mended,
        )


@error("reward.overlong.penalty")
def overlong_penalty_positive(c: View) -> Found:
    """A penalty of 0 does nothing, and a negative one pays for long completions."""
    if c.reward.overlong is not None and le(c.reward.overlong.penalty, 0):
        yield broken(
            f"{state(c, 'reward.overlong.penalty')} is not positive.",
            {"reward.overlong.penalty": 1.0},
            {"reward.overlong": None},
        )


@error(*OVERLONG, "rollout.max_new_tokens")
def overlong_can_fire(c: View) -> Found:
    """The ramp begins at max_tokens - buffer_tokens. No completion gets longer than rollout.max_new_tokens, so a ramp
    that begins there or later is always 0."""
    if _cannot_fire(c):
        longest, buffer = c.rollout.max_new_tokens, c.reward.overlong.buffer_tokens
        start = c.reward.overlong.max_tokens - buffer
        mended = {OVERLONG[0]: longest} | ({OVERLONG[1]: max(1, longest // 4)} if buffer > longest else {})
        yield broken(
            f"The overlong penalty begins at {start} tokens ({state(c, *OVERLONG)}), but "
            f"rollout.max_new_tokens={longest}: it is always 0.",
            mended,
            {"reward.overlong": None},
        )


@warning(*OVERLONG, "rollout.max_new_tokens")
def overlong_max_equals_max_new_tokens(c: View) -> Found:
    """The ramp ends elsewhere than generation: the penalty is never full, or full too early."""
    overlong = c.reward.overlong
    if overlong is not None and overlong.max_tokens != c.rollout.max_new_tokens and not _cannot_fire(c):
        longest = c.rollout.max_new_tokens
        mended = {OVERLONG[0]: longest}
        if overlong.buffer_tokens > longest:
            mended[OVERLONG[1]] = max(1, longest // 4)
        yield broken(f"{state(c, OVERLONG[0])} is not rollout.max_new_tokens={longest}.", mended)


@warning("reward.overlong.penalty", "reward.terms")
def overlong_penalty_below_reward(c: View) -> Found:
    """A penalty above all weights together scores a correct long answer below a wrong short one."""
    total = sum(abs(term.weight) for term in c.reward.terms)
    if c.reward.overlong is not None and gt(c.reward.overlong.penalty, total):
        lower = [{"reward.overlong.penalty": total}] if total > 0 else []
        yield broken(
            f"{state(c, 'reward.overlong.penalty')} is more than all weights of reward.terms together ({total:g}).",
            *lower,
            {"reward.overlong": None},
        )


@warning("loss.mask_truncated", "reward.overlong")
def overlong_excludes_mask_truncated(c: View) -> Found:
    """The completions with the full penalty are masked, so it moves only the baselines of the others."""
    if c.reward.overlong is not None and c.loss.mask_truncated:
        yield broken(
            "loss.mask_truncated=true masks the completions that reward.overlong punishes most.",
            {"loss.mask_truncated": False},
            {"reward.overlong": None},
        )


def _cannot_fire(c: View) -> bool:
    overlong = c.reward.overlong
    if overlong is None or not gt(overlong.buffer_tokens, 0):
        return False
    return ge(overlong.max_tokens - overlong.buffer_tokens, c.rollout.max_new_tokens)


declare(
    "python_reward_callable", "error", "reward", "start", "reward.terms",
    why="""The file or function of a python term does not exist, or its signature asks for what the message does not
    list. It would fail at the first score, after weights and one rollout. Correct path, function or the signature.""",
)  # fmt: skip
declare(
    "reward_packages_installed", "error", "reward", "start", "reward.terms",
    why="""A reward term needs a package that cannot be found: an import error after the first rollout. Install the
    extra that the message names.""",
)  # fmt: skip
declare(
    "gold_answers_present", "error", "reward", "start", "data.answer_key", "data.train", "reward.terms",
    why="""An answer that a term reads is empty. Every completion of that row would be right, or none. Repair or remove
    the listed rows.""",
)  # fmt: skip
declare(
    "gold_answers_parse", "warning", "reward", "start", "data.answer_key", "data.train", "reward.terms",
    why="""An answer cannot be parsed by the term that reads it. Its completions stay unscored, so the group is dropped
    each time. Repair or remove the listed rows.""",
)  # fmt: skip
