"""The tokenizer helper: readable or one clear error, and never somebody else's code."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from configs import make_config

from grpo_cli.errors import ConfigError
from grpo_cli.model.builtin import tiny_tokenizer
from grpo_cli.model.tokenizer import load_tokenizer


def saved(folder: Path, **changes) -> Path:
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return folder


def load(path: Path | str, **changes):
    return load_tokenizer(make_config(f"model.path='{path}'").model.model_copy(update=changes))


def test_a_local_directory(tmp_path):
    tokenizer = load(saved(tmp_path))
    assert tokenizer.decode(tokenizer("é 1").input_ids) == "é 1"
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")


def test_eos_stands_in_for_a_missing_pad(tmp_path):
    assert load(saved(tmp_path, pad_token=None)).pad_token == "<|end|>"


def test_no_eos_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="has no EOS token"):
        load(saved(tmp_path, eos_token=None))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_one_is_one_finding(tmp_path, content):
    if content is not None:
        (saved(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    (finding,) = caught.value.findings
    assert finding.rule == "model_readable"
    assert str(tmp_path) in finding.message


def test_l01_code_beside_the_tokenizer_is_not_run(tmp_path):
    """Either an error or the plain tokenizer: the module that writes the sentinel is not imported."""
    folder, sentinel = saved(tmp_path / "model"), tmp_path / "sentinel"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(sentinel)!r}, 'w')\nclass Own: ...\n")
    with contextlib.suppress(ConfigError):
        load(folder)
    assert not sentinel.exists()
