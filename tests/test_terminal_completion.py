"""What the shell is offered; one test goes through a real bash."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo_cli import cli
from grpo_cli.cli import COMMANDS
from grpo_cli.terminal import completion
from grpo_cli.terminal.completion import candidates

SOURCE = str(Path(completion.__file__).resolve().parents[2])


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("grpo val", ["validate "]),
        ("grpo train loss=g", ["loss=gmpo ", "loss=gspo "]),
        ("grpo train +loss=gs", ["+loss=gspo "]),
        ("grpo train -m loss=gspo,ci", ["loss=gspo,cispo"]),
        ("grpo train +exp", ["+experiment="]),
        ("grpo train +experiment=smo", ["+experiment=smoke "]),
        ("grpo train loss.cl", ["loss.clip_high=", "loss.clip_low="]),
        ("grpo train loss.correction.m", ["loss.correction.mode="]),
        ("grpo train loss.correction.mode=t", ["loss.correction.mode=truncate "]),
        ("grpo train rollout.sl", []),
        ("grpo train rollout=vllm rollout.sl", ["rollout.sleep_level="]),
        ("grpo train trainer.offload_param=", ["trainer.offload_param=false ", "trainer.offload_param=true "]),
        ("grpo train loss.dual_clip=", ["loss.dual_clip=null "]),
        ("grpo train no.such.key=", []),
        ("grpo train --mul", ["--multirun "]),
        ("grpo report ru", []),
        ("grpo replay ru", []),
        ("grpo replay a.jsonl ru", ["run."]),
        ("grpo train 'open", []),
        ("grpo validate --explain lr_pos", ["lr_positive "]),
        ("grpo", []),
    ],
)
def test_candidates(line, offered):
    assert candidates(line) == offered


def test_groups_and_sections_after_the_subcommand():
    offered = candidates("grpo train ")
    assert {"loss=", "loss.", "experiment=", "trainer.", "model="} <= set(offered)
    assert "trainer=" not in offered


@pytest.mark.parametrize("command", [command for command in COMMANDS if find_spec(COMMANDS[command])])
def test_the_flags_are_those_of_the_commands_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    usage = capsys.readouterr().out.partition("options:")[2].partition("\n\n")[0]
    flags = set(re.findall(r"(?<=[ ,])--?[a-z][a-z-]*", usage)) - {"-h"}
    assert flags == set(completion.FLAGS[command])


def test_a_users_own_options_are_offered(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n")
    assert candidates(f"grpo train --config-dir {tmp_path} experiment=mi") == ["experiment=mine "]


def test_files_for_keys_that_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "rowing").mkdir()
    assert candidates("grpo train data.train=row") == ["data.train=rowing/", "data.train=rows.jsonl"]


def test_the_function_that_bash_gets_works_in_bash(tmp_path):
    command = tmp_path / "grpo"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m grpo_cli.cli "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    line = "grpo train +experiment=smoke loss=gsp"
    script = f"""
        eval "$(grpo completion bash)"
        COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({line}) COMP_CWORD=3
        _grpo_completion
        printf '[%s]\\n' "${{COMPREPLY[@]}}"
        complete -p grpo
    """
    env = {**os.environ, "PYTHONPATH": SOURCE, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, env=env)
    assert ended.stdout.splitlines()[0] == "[loss=gspo ]"
    assert "_grpo_completion grpo" in ended.stdout
    assert ended.stderr == ""
