"""Which values are paths, and what they become."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_cli.paths import absolute


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "model").mkdir()
    (tmp_path / "t.jinja").write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("run", "dir", "runs/x", "{base}/runs/x"),
        ("run", "dir", "/abs/../x", "/x"),
        ("model", "path", "org/name", "org/name"),
        ("model", "path", "builtin:tiny", "builtin:tiny"),
        ("model", "path", "model", "{base}/model"),
        ("model", "path", "./nothing", "{base}/nothing"),
        ("model", "path", "~/m", "/home/me/m"),
        ("model", "path", "???", "???"),
        ("model", "path", None, None),
        ("model", "path", 3, 3),
        ("model", "path", "", ""),
        ("data", "train", "d.jsonl", "{base}/d.jsonl"),
        ("data", "train", "???", "???"),
        ("data", "train", "", ""),
        ("data", "chat_template", "t.jinja", "{base}/t.jinja"),
        ("data", "chat_template", "{{ messages }}", "{{ messages }}"),
        ("data", "chat_template", "x" * 5000, "x" * 5000),
        ("data", "chat_template", "~/t.jinja", "/home/me/t.jinja"),
        ("trainer", "resume", "auto", "auto"),
        ("trainer", "resume", "never", "never"),
        ("trainer", "resume", "runs/c", "{base}/runs/c"),
    ],
)
def test_a_path_becomes_absolute_and_nothing_else_changes(base, section, key, value, expected):
    config = {section: {key: value, "other": "o"}}
    wanted = expected.replace("{base}", str(base)) if isinstance(expected, str) else expected
    assert absolute(config, base) == {section: {key: wanted, "other": "o"}}
    assert config == {section: {key: value, "other": "o"}}


def test_rows_of_the_hub_are_no_path_unless_they_are_here(base):
    config = {"data": {"name": "hf", "train": "openai/gsm8k", "eval": "model"}}
    assert absolute(config, base)["data"] == {"name": "hf", "train": "openai/gsm8k", "eval": f"{base}/model"}


def test_only_python_terms_have_a_path(base):
    terms = [
        {"name": "python", "path": "f.py"},
        {"name": "exact", "path": "f.py"},
        "odd",
        {"name": "python", "path": 1},
    ]
    changed = absolute({"reward": {"terms": terms}}, base)["reward"]["terms"]
    assert changed == [{"name": "python", "path": f"{base}/f.py"}, *terms[1:]]


def test_broken_sections_are_left_for_the_schema(base):
    for config in ({"run": None, "data": "x", "reward": []}, {"data": None}, {"reward": {"terms": "x"}}):
        assert absolute(config, base) == config
