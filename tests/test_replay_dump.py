"""The reader of rollout dumps, fed with whatever a file may hold: groups, or findings that name their line."""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_cli.errors import ConfigError
from grpo_cli.replay import replay
from grpo_cli.replay.dump import Row, parse_groups, read_file
from grpo_cli.types import Group

COMPLETION = {
    "text": "5",
    "token_ids": [7, 2],
    "finish_reason": "stop",
    "rewards": {"exact": 1.0},
    "logprobs": [-0.5, -0.25],
    "old_logprobs": [-0.5, -0.25],
    "ref_logprobs": None,
    "sampler_logprobs": [-0.5, -0.25],
}
GROUP = {
    "step": 1,
    "group_id": "1-0",
    "prompt_id": "row-0",
    "prompt": "2 + 3",
    "prompt_token_ids": [1, 5],
    "policy_version": 0,
    "completions": [COMPLETION, {**COMPLETION, "rewards": {"exact": 0.0}}],
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FUZZED = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mistakes(read: Callable[[], list[Group]]) -> list[str]:
    """Messages of what was refused, their count beyond the first ones apart; none where it was read."""
    try:
        read()
    except ConfigError as error:
        return [finding.message for finding in error.findings if "more mistakes" not in finding.message]
    return []


@given(content=st.lists(st.binary(max_size=40) | st.just(json.dumps(GROUP).encode()), max_size=4).map(b"\n".join))
@FUZZED
def test_any_bytes_are_groups_or_findings_with_their_line(tmp_path: Path, content: bytes):
    file = tmp_path / "dump.jsonl"
    file.write_bytes(content)
    told = mistakes(lambda: parse_groups(read_file(file)))
    lines = [line for line in content.removeprefix(codecs.BOM_UTF8).split(b"\n") if line.strip(b" \t\r\n")]
    # An empty file has no line to name; a mistake in one that has lines names its own.
    assert all(str(file) in message for message in told)
    assert all(f"{file}:" in message for message in told) or not lines
    good = json.dumps(GROUP).encode()  # twice it is refused: its group_id stands in the file already
    assert bool(told) == (any(line != good for line in lines) or lines.count(good) > 1) or not lines


@given(
    place=st.sampled_from([*((key,) for key in GROUP), *(("completions", 0, key) for key in COMPLETION)]), value=VALUES
)
@FUZZED
def test_any_value_in_any_field_is_read_or_refused_by_its_name(place: tuple, value: object):
    group: Any = copy.deepcopy(GROUP)
    owner = group
    for step in place[:-1]:
        owner = owner[step]
    owner[place[-1]] = value
    for message in mistakes(lambda: parse_groups([Row("dump.jsonl:1", group)])):
        assert "dump.jsonl:1" in message


def test_the_group_that_is_varied_here_is_a_valid_one():
    # (1 - 1/2) / (sqrt(1/2) + 1e-6) = 0.7071058
    assert (
        abs(replay(["rollout.num_generations=2"], [copy.deepcopy(GROUP)])["groups"][0]["advantages"][0] - 0.7071058)
        < 1e-6
    )
