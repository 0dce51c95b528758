"""Sweeps: which jobs there are, where they run, what a failing one does to the others.

The launcher is a stand-in, but for the last test, whose jobs are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_cli import cli
from grpo_cli.errors import Finding, GuardStop, RunError
from grpo_cli.files.rundir import RunDir
from grpo_cli.options import conf_dir, read_groups
from grpo_cli.overrides import jobs

GROUPS = read_groups([conf_dir()])


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    """Records what is launched; `outcome[n]`, an exit code or an exception, is what becomes of job n."""
    monkeypatch.chdir(tmp_path)
    launched, outcome = [], {}

    def launch(config, run_dir):
        launched.append((config, run_dir))
        result = outcome.get(int(run_dir.name), 0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("grpo_cli.launch.launch", launch)
    monkeypatch.setattr("grpo_cli.checks.start.check", lambda config: [])
    return launched, outcome


def test_four_jobs_in_four_directories_in_order(launcher, capsys, tmp_path):
    launched, _ = launcher
    assert cli.main(["train", "-m", "+experiment=smoke", "loss=ppo_clip,dapo", "trainer.lr=1e-3,3e-3"]) == 0
    seen = [(config["loss"]["name"], config["trainer"]["lr"]) for config, _ in launched]
    assert seen == [("ppo_clip", 1e-3), ("ppo_clip", 3e-3), ("dapo", 1e-3), ("dapo", 3e-3)]
    directories = [run_dir for _, run_dir in launched]
    assert [directory.name for directory in directories] == ["0", "1", "2", "3"]
    assert len({directory.parent for directory in directories}) == 1  # one time stamp for the sweep
    assert directories[0].parent.parent == tmp_path / "runs" / "smoke"
    assert all(config["run"]["dir"] == str(run_dir) for config, run_dir in launched)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Sweep of 4 jobs:"
    assert out[2].startswith("  1: loss=ppo_clip trainer.lr=0.003 -> ")
    assert out[-1] == "Sweep: 4 of 4 jobs done."


def test_an_invalid_job_stops_no_other_and_says_why(launcher, capsys, tmp_path):
    launched, _ = launcher
    code = cli.main(["train", "-m", "+experiment=smoke", "run.dir=R", "rollout.num_generations=4,1,2"])
    assert code == 2
    assert [config["rollout"]["num_generations"] for config, _ in launched] == [4, 2]
    state = json.loads((tmp_path / "R" / "1" / "run.json").read_text())
    assert state["exit_code"] == 2
    assert "group_advantage_needs_two_generations" in state["reason"]
    captured = capsys.readouterr()
    assert "Sweep: 2 of 3 jobs done." in captured.out
    assert captured.out.splitlines()[-1].startswith("  exit 2: 1: rollout.num_generations=1")


def test_every_failure_is_listed_and_a_failed_run_decides_the_code(launcher, capsys, tmp_path):
    _, outcome = launcher
    outcome.update({1: 3, 2: RunError("disk full"), 3: GuardStop("no signal"), 4: ZeroDivisionError("ours")})
    sweep = ["train", "-m", "+experiment=smoke", "run.dir=R", "run.seed=range(0,6)", "trainer.lr=1e-3"]
    assert cli.main(sweep) == 3
    captured = capsys.readouterr()
    assert "Sweep: 2 of 6 jobs done." in captured.out
    lines = [line.strip().split(":")[0] for line in captured.out.splitlines()[-4:]]
    assert lines == ["exit 3", "exit 1", "exit 3", "exit 1"]
    assert "disk full" in captured.out
    assert "Traceback" in captured.err  # of our own mistake only
    assert json.loads((tmp_path / "R" / "2" / "run.json").read_text())["reason"] == "disk full"


def test_the_run_json_of_another_run_is_left_alone(launcher, monkeypatch, tmp_path):
    (tmp_path / "R" / "0").mkdir(parents=True)
    (tmp_path / "R" / "0" / "run.json").write_text('{"status": "done"}')
    fresh = Finding("run_dir_is_fresh", ("run.dir",), "It holds a run.", "trainer.resume=auto")
    monkeypatch.setattr("grpo_cli.checks.start.check", lambda config: [fresh])
    assert cli.main(["train", "-m", "+experiment=smoke", "run.dir=R", "run.seed=0,1"]) == 2
    assert (tmp_path / "R" / "0" / "run.json").read_text() == '{"status": "done"}'


def test_config_errors_beside_a_failed_run_give_the_runs_code(launcher):
    _, outcome = launcher
    outcome[1] = 1
    assert cli.main(["train", "-m", "+experiment=smoke", "run.dir=R", "rollout.num_generations=1,4"]) == 1


def test_a_signal_ends_the_sweep(launcher, capsys):
    launched, outcome = launcher
    outcome[0] = 143
    assert cli.main(["train", "-m", "+experiment=smoke", "run.dir=R", "run.seed=0,1,2"]) == 143
    assert len(launched) == 1
    assert capsys.readouterr().out.count("not started") == 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_during_the_checks_of_a_job_ends_the_sweep_in_words(launcher, monkeypatch, capsys, tmp_path, signum):
    launched, outcome = launcher
    outcome[0] = 1
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]

    def check(config):
        if config.run.seed == 1:
            with contextlib.suppress(Exception):  # as checks do around other people's code
                for _ in range(2):  # a scheduler may well tell twice
                    os.kill(os.getpid(), signum)
                time.sleep(30)
        return []

    monkeypatch.setattr("grpo_cli.checks.start.check", check)
    assert cli.main(["train", "-m", "+experiment=smoke", "run.dir=R", "run.seed=range(0,4)"]) == 128 + signum
    assert len(launched) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.strip().split(":")[0] for line in out[-4:]] == ["exit 1", f"exit {128 + signum}", *["not started"] * 2]
    state = json.loads((tmp_path / "R" / "1" / "run.json").read_text())
    assert (state["status"], state["exit_code"]) == ("stopped", 128 + signum)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]


@pytest.mark.parametrize("status", ["done", "failed", "stopped", "running"])
def test_a_refused_job_leaves_the_run_in_its_directory_alone(launcher, capsys, tmp_path, status):
    run_dir = RunDir.create(tmp_path / "R" / "0")
    run_dir.begin(seed=0, steps=4)
    run_dir.update(status=status, step=4)
    before = run_dir.state()
    assert cli.main(["train", "-m", "+experiment=smoke", "run.dir=R", "rollout.num_generations=1,4"]) == 2
    assert run_dir.state() == before
    assert capsys.readouterr().out.splitlines()[-1].startswith("  exit 2: 0: rollout.num_generations=1")


def test_a_launch_that_breaks_off_is_the_attempt_that_failed(launcher, monkeypatch, tmp_path):
    def launch(config, run_dir):
        RunDir.create(run_dir).begin(seed=0, steps=4)
        raise OSError("no more processes")

    monkeypatch.setattr("grpo_cli.launch.launch", launch)
    assert cli.main(["train", "-m", "+experiment=smoke", "run.dir=R", "run.seed=0,1"]) == 1
    state = RunDir(tmp_path / "R" / "1").state()
    assert (state["status"], state["reason"], state["previous"]) == ("failed", "OSError: no more processes", [])


def test_a_config_dir_that_is_none_is_refused_before_any_job(launcher, capsys, tmp_path):
    assert cli.main(["train", "-m", "--config-dir", "nodir", "+experiment=smoke", "run.seed=0,1"]) == 2
    assert capsys.readouterr().err.count("no such directory") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stdout", ["closed pipe", "/dev/full"])
def test_a_sweep_goes_on_where_nobody_reads_it(tmp_path, stdout):
    """In a process of its own, for the flush at its end; its jobs are refused, which is as good as run here."""
    if stdout == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(stdout, os.O_WRONLY)
    swept = ["train", "-m", "+experiment=smoke", "run.dir=R", "rollout.num_generations=1", "run.seed=0,1,2"]
    done = _grpo(tmp_path, *swept, stdout=writer)
    os.close(writer)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert [json.loads((tmp_path / "R" / n / "run.json").read_text())["exit_code"] for n in "012"] == [2, 2, 2]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.lr=1e-3,2e-3", "trainer.lr=3e-3,4e-3"],
        ["trainer.lr=1e-3,2e-3", "trainer.lr=3e-3"],
        [
            "reward.overlong={max_tokens: 64, buffer_tokens: 8, penalty: 1},null",
            "reward.overlong={max_tokens: 32, buffer_tokens: 8, penalty: 1},null",
        ],
        ["loss=gspo,dapo", "+loss=cispo"],
    ],
)
def test_a_swept_key_given_twice_is_refused_before_any_job(launcher, overrides, capsys):
    launched, _ = launcher
    assert cli.main(["train", "-m", "+experiment=smoke", *overrides]) == 2
    assert launched == []
    assert "[config_composes]" in capsys.readouterr().err


def test_an_override_that_does_not_parse_is_refused_before_any_job(launcher, capsys):
    launched, _ = launcher
    assert cli.main(["train", "-m", "run.dir=a=b,c", "run.seed=0,1"]) == 2
    assert launched == []
    assert "[override_parses]" in capsys.readouterr().err


def test_hydras_own_keys_that_do_nothing_leave_the_sweep_alone(launcher):
    launched, _ = launcher
    overrides = ["+experiment=smoke", "rollout.num_generations=2,4", "hydra.verbose=true"]
    assert cli.main(["train", "-m", *overrides]) == 0
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("loss=glob(g*)", ["loss=gmpo", "loss=gspo"]),
        ("run.seed=range(0,3)", ["run.seed=0", "run.seed=1", "run.seed=2"]),
        ("run.name=choice(a,b)", ["run.name=a", "run.name=b"]),
        ("run.name='a#1','b,2'", ["run.name='a#1'", "run.name='b,2'"]),
        ("trainer.betas=[0.9,0.99],[0.9,0.999]", ["trainer.betas=[0.9,0.99]", "trainer.betas=[0.9,0.999]"]),
        ("+experiment=grpo,smoke", ["+experiment=grpo", "+experiment=smoke"]),
    ],
)
def test_hydras_ways_to_write_a_sweep(override, values):
    assert jobs([override], GROUPS) == ([[value] for value in values], [])


@pytest.mark.parametrize("override", ["trainer.lr=interval(0,1)", "hydra.verbose=true,false", "loss=glob(zz*)"])
def test_what_cannot_be_swept_is_refused(override):
    combinations, findings = jobs([override], GROUPS)
    assert combinations == []
    assert findings[0].rule == "override_parses"


def _grpo(folder: Path, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    source = str(Path(cli.__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "grpo_cli.cli", *arguments]
    pipes: dict = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run(command, cwd=folder, env=env, timeout=300, **pipes)


def _numbers(run_dir: Path) -> list[dict]:
    """What a run logged, without what the clock says."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "time/" not in k and "_per_s" not in k} for row in rows]


@pytest.mark.slow
def test_real_jobs_around_an_invalid_one_leave_nothing_in_each_other(tmp_path):
    common = ["+experiment=smoke", "trainer.steps=1", "trainer.prompts_per_step=4", "logger.console=plain"]
    swept = _grpo(tmp_path, "train", "-m", *common, "run.dir=R", "rollout.num_generations=8,1,4")
    assert swept.returncode == 2, swept.stderr
    states = [json.loads((tmp_path / "R" / n / "run.json").read_text()) for n in "012"]
    assert [(state["status"], state["exit_code"]) for state in states] == [("done", 0), ("refused", 2), ("done", 0)]
    alone = _grpo(tmp_path, "train", *common, "run.dir=A", "rollout.num_generations=4")
    assert alone.returncode == 0, alone.stderr
    assert _numbers(tmp_path / "A") == _numbers(tmp_path / "R" / "2") != _numbers(tmp_path / "R" / "0")
