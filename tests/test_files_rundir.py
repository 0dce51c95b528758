"""The run directory: one owner, whole files, and a clear word when the disk is full."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from grpo_cli.errors import ConfigError, RunError
from grpo_cli.files import jsonio
from grpo_cli.files.groupjson import from_state, to_dump, to_state
from grpo_cli.files.redact import is_own_secret, is_secret, redact
from grpo_cli.files.rundir import RunDir
from grpo_cli.types import Completion, Group, Prompt


def group(index: int = 3, step: int = 12) -> Group:
    prompt = Prompt("row-57", "What is 2 + 3?", [1, 42], "5", {"question": "What is 2 + 3?"}, "a.jsonl:58")
    completion = Completion(
        "5\ud800", [9, 2], "stop", {"exact": 1.0, "math": None}, 1.0, 1.0, 0.1, sampler_logprobs=[-0.1, -0.3]
    )
    return Group(f"{step}-{index}", prompt, [completion], step, step)


def test_directory_is_private_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    assert stat.S_IMODE(RunDir.create(tmp_path / "a/b").path.stat().st_mode) == 0o700
    (tmp_path / "c").mkdir(mode=0o755)
    assert stat.S_IMODE(RunDir.create(tmp_path / "c").path.stat().st_mode) == 0o755


def test_unwritable_directory_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir_writable"):
        RunDir.create(tmp_path / "file/run")


def test_who_only_asks_for_the_owner_is_none(tmp_path: Path) -> None:
    """`grpo status` looks at the lock for a moment, and a run that starts just then waits for it."""
    run_dir = RunDir.create(tmp_path)
    fd = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    looked = threading.Timer(0.15, os.close, [fd])
    looked.start()
    run_dir.lock()
    looked.join()
    run_dir.unlock()


def test_one_owner(tmp_path: Path) -> None:
    first, second = RunDir.create(tmp_path), RunDir.create(tmp_path)
    assert second.owner() is None
    first.lock()
    assert (second.owner() or {})["pid"] == os.getpid()
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_config_reads_back_as_it_was(tmp_path: Path) -> None:
    config = {
        "lr": 1e-6,
        "text": "1e-6",
        "no": "no",
        "odd": "${x \\boxed{é}\n",
        "none": None,
        "flag": True,
        "list": [1, 2.0],
    }
    run_dir = RunDir.create(tmp_path)
    run_dir.write_config(config)
    assert run_dir.read_config() == config
    assert isinstance(run_dir.read_config()["lr"], float)


def test_config_with_a_secret_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    run_dir = RunDir.create(tmp_path)
    with pytest.raises(ConfigError, match=r"data.train holds the value of HF_TOKEN") as caught:
        run_dir.write_config({"data": {"train": "https://x/?t=hf_" + "a" * 30}})
    assert "aaaa" not in str(caught.value)
    assert not run_dir.config_path.exists()
    assert redact("hf_" + "a" * 30) == "<HF_TOKEN>"


def test_secrets_are_known_by_the_words_of_their_names() -> None:
    ours = [
        "GRPO_SERVER_KEY",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HUGGINGFACE_TOKEN",
        "VLLM_API_KEY",
    ]
    others = [
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "GITHUB_PAT",
        "OPENAI_APIKEY",
        "PGPASSWORD",
        "MY_CREDENTIALS",
    ]
    plain = ["PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "HF_TOKEN_PATH", "HF_HOME", "SSH_AUTH_SOCK"]
    assert [name for name in [*ours, *others, *plain] if is_secret(name)] == [*ours, *others]
    assert [name for name in [*ours, *others, *plain] if is_own_secret(name)] == ours
    assert redact("the key is " + "k" * 40, {"GRPO_SERVER_KEY": "k" * 40}) == "the key is <GRPO_SERVER_KEY>"


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path)
    run_dir.append_metrics({"step": 1, "loss": float("nan"), "kl": float("inf"), "reward": 0.1})
    assert run_dir.metrics_path.read_text() == '{"step": 1, "loss": null, "kl": null, "reward": 0.1}\n'


def test_state_machine_keeps_earlier_attempts(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path)
    run_dir.begin(seed=7, steps=10)
    run_dir.update(status="running", step=4, wandb={"id": "abc", "last_step": 4})
    run_dir.begin(seed=7, steps=10)
    run_dir.end(143, "stopped by signal 15")
    state = run_dir.state()
    assert (state["status"], state["exit_code"], state["step"]) == ("stopped", 143, 0)
    assert [(a["status"], a["step"]) for a in state["previous"]] == [("lost", 4)]
    assert state["wandb"]["id"] == "abc"
    assert state["seeds"] == {"run": 7}
    assert state["versions"]["grpo"]


def test_rollout_dump_has_the_form_of_the_design(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path)
    run_dir.dump_rollouts(13, [group()])
    assert run_dir.rollout_path(13).name == "step_000013.jsonl"
    [line] = run_dir.rollout_path(13).read_text().splitlines()
    dump = json.loads(line)
    assert dump["step"] == 13
    assert dump["group_id"] == "12-3"
    assert dump["completions"][0]["old_logprobs"] is None
    assert dump["completions"][0]["text"] == "5\ud800"
    assert set(dump["completions"][0]) == {
        *("text", "token_ids", "finish_reason", "rewards", "reward", "advantage"),
        *("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"),
    }
    assert to_dump(group(), 13) == dump


def test_group_state_is_exact_but_for_the_row() -> None:
    """Rows of a data set may hold what JSON has not; nothing reads one after scoring."""
    original = group()
    prompt = replace(original.prompt, row={"at": datetime(2024, 1, 1), "raw": b"\xff", "level": float("nan")})
    state = jsonio.dumps(to_state(replace(original, prompt=prompt)))
    assert from_state(json.loads(state)) == replace(original, prompt=replace(prompt, row={}))


def test_rewind_forgets_later_steps_and_torn_lines(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path)
    for step in (1, 2, 3):
        run_dir.append_metrics({"step": step})
        run_dir.append_ledger({"step": step})
        run_dir.dump_rollouts(step, [group(step=step)])
    with open(run_dir.metrics_path, "a") as file:
        file.write('{"step": 4, "rew')
    run_dir.rewind(2)
    assert [row["step"] for row in jsonio.read_rows(run_dir.metrics_path)] == [1, 2]
    assert len(run_dir.metrics_path.read_text().splitlines()) == 2
    assert [row["step"] for row in jsonio.read_rows(run_dir.ledger_path)] == [1, 2]
    assert [step for step, _ in run_dir.rollout_files()] == [1, 2]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_at_metrics_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir.create(tmp_path)
    run_dir.append_metrics({"step": 1})
    write = os.write
    calls = iter([lambda fd, data: write(fd, data[:5]), full_disk])
    monkeypatch.setattr(os, "write", lambda fd, data: next(calls)(fd, data))
    with pytest.raises(RunError, match=r"disk is full: .*metrics.jsonl"):
        run_dir.append_metrics({"step": 2})
    monkeypatch.undo()
    assert run_dir.metrics_path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_full_disk_leaves_the_old_file_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    run_dir = RunDir.create(tmp_path)
    run_dir.dump_rollouts(1, [group()])
    before = run_dir.rollout_path(1).read_text()
    monkeypatch.setattr(os, failing, full_disk)
    with pytest.raises(RunError, match=r"disk is full: .*step_000001.jsonl"):
        run_dir.dump_rollouts(1, [group(), group(4)])
    monkeypatch.undo()
    assert [path.name for path in run_dir.rollouts.iterdir()] == ["step_000001.jsonl"]
    assert run_dir.rollout_path(1).read_text() == before
