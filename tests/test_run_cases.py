"""Field cases (shared/cases.md) that only a whole run shows: failing terms, empty steps, stopping, resuming, sweeps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inprocess import TINY, FakeWandb, StageFile, execute, groups, metrics, state, train
from safetensors.torch import load_file

from grpo_cli import cli
from grpo_cli.checkpoint import manifest
from grpo_cli.files.rundir import RunDir
from grpo_cli.process.signals import stop
from grpo_cli.rollout.source import SyncSource
from grpo_cli.trainer.policy import Policy

TERM = """
calls = 0

def alternate(completions, keep):
    return [float(wanted and i % 2) for i, wanted in enumerate(keep)]

def faulty(completions):
    global calls
    calls += 1
    rewards = [float(i % 2) for i in range(len(completions))]
    if calls > 1:
        {fault}
    return rewards
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost a model this small more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def term(folder: Path, function: str, fault: str = "pass") -> str:
    path = folder / "term.py"
    path.write_text(TERM.format(fault=fault))
    return f"reward.terms=[{{name: python, weight: 1.0, path: {path}, function: {function}}}]"


def rows(folder: Path, *keep: int) -> list[str]:
    """Overrides for one pass over rows whose groups have signal where `keep` is 1."""
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"p{i}", "answer": "", "keep": k}) + "\n" for i, k in enumerate(keep))
    )
    data = ["data=jsonl", f"data.train={path}", "data.shuffle=false", "data.max_prompt_tokens=64"]
    return [*data, "trainer.steps=null", "trainer.epochs=1", term(folder, "alternate")]


def measured(row: dict) -> dict:
    """A row without what the clock says."""
    return {key: value for key, value in row.items() if not key.startswith("time/") and not key.endswith("_per_s")}


def last_checkpoint(directory: Path) -> Path:
    return max((directory / "checkpoints").glob("step_*"))


# A06, A07, A15: a term that fails in the middle of a run


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("rewards[1] = float('inf')", "completion 1, step 2: returned inf"),
        ("rewards[1] = float('nan')", "completion 1, step 2: returned nan"),
        ("rewards = [1.0]", "returned 1 rewards for 8 completions"),
        ("raise OSError('no judge')", "OSError: no judge (term.py:12)"),
    ],
)
def test_a06_a07_a15_a_failing_term_ends_the_run_and_no_step_of_it_is_applied(tmp_path, fault, told):
    run = tmp_path / "run"
    assert train(run, term(tmp_path, "faulty", fault), "trainer.steps=4", "trainer.save_every=1") == 1
    assert state(run)["status"] == "failed"
    assert state(run)["reason"].startswith("reward term faulty ")
    assert told in state(run)["reason"]
    assert [row["step"] for row in metrics(run)] == [1]
    weights = load_file(last_checkpoint(run) / "slices_00000.safetensors")
    assert last_checkpoint(run).name == "step_000001"
    assert all(tensor.isfinite().all() for tensor in weights.values())


# D09: weights that do not reach the engine


def test_d09_a_sync_that_brings_other_weights_ends_the_run_and_its_step_is_written_down(tmp_path, monkeypatch):
    score = Policy.score
    syncs = []

    def off_from_the_third(self, prompt_ids, completion_ids):
        syncs.append(1)
        return [value - 0.5 * (len(syncs) > 2) for value in score(self, prompt_ids, completion_ids)]

    monkeypatch.setattr(Policy, "score", off_from_the_third)
    run = tmp_path / "run"
    letters = "reward.terms=[{name: regex, weight: 1.0, pattern: '[A-Za-z]'}]"
    assert train(run, letters, "trainer.lr=1e-2", "trainer.steps=4", "trainer.save_every=1") == 3
    assert state(run)["status"] == "guard"
    assert "rollout.sync_tolerance" in state(run)["reason"]
    first, second = metrics(run)
    assert first["sync/logprob_gap_max"] < 1e-4
    assert (second["step"], second["updates/applied_count"]) == (2, 1)
    assert "sync/logprob_gap_max" not in second
    assert last_checkpoint(run).name == "step_000001"


# E06: an empty step


@pytest.fixture(scope="module")
def gap(tmp_path_factory) -> Path:
    """Steps of the rows (1, 0), (0, 0), (1): of the second nothing is left, and the third is a tail of one prompt."""
    home = tmp_path_factory.mktemp("gap")
    assert train(home / "run", *rows(home, 1, 0, 0, 0, 1), "trainer.warmup_steps=2", "filter=zero_std") == 0
    return home / "run"


def test_e06_an_empty_step_counts_and_leaves_the_rate_alone(gap, tmp_path):
    assert train(tmp_path / "run", *rows(tmp_path, 1, 1, 1, 1, 1), "trainer.warmup_steps=2") == 0
    with_gap, without = metrics(gap), metrics(tmp_path / "run")
    assert [row["step"] for row in with_gap] == [row["step"] for row in without] == [1, 2, 3]
    assert [row["lr"] for row in with_gap] == [row["lr"] for row in without] == pytest.approx([1.5e-3, 3e-3, 3e-3])
    empty = with_gap[1]
    assert (empty["reward"], empty["groups/dropped_count"], empty["updates/applied_count"]) == (0.0, 2, 0)
    assert not [key for key in empty if key.startswith(("loss", "ratio/", "kl", "grad_norm"))]


def test_the_last_step_is_evaluated_and_saved_where_drops_decide_which_it_is(tmp_path):
    """Step 1 takes all prompts, in two rounds, and carries one group; step 2 trains that one, and is the last."""
    given = [*rows(tmp_path, 1, 0, 1, 1), "filter=dynamic_sampling", "filter.max_rounds=2", "filter.surplus=carry"]
    often = [f"data.eval={tmp_path / 'rows.jsonl'}", "trainer.eval_every=50", "trainer.save_every=50"]
    assert train(tmp_path / "run", *given, *often) == 0
    evaluated = {row["step"]: "eval/reward" in row for row in metrics(tmp_path / "run")}
    assert evaluated == {0: True, 1: False, 2: True}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000002"]


def test_g09_the_tail_is_trained_and_every_prompt_has_its_fate(gap):
    found = [(group["prompt_id"], group["dropped"]) for group in groups(gap)]
    assert found == [
        *[("row-0", None), ("row-1", "zero_std"), ("row-2", "zero_std"), ("row-3", "zero_std"), ("row-4", None)]
    ]


@pytest.mark.slow
def test_e07_f10_g09_two_processes_of_which_one_has_nothing_left(gap, tmp_path):
    """In step 1 the second rank's only prompt is dropped, in step 2 both are, in step 3 the second rank has none."""
    run = tmp_path / "run"
    given = [*rows(tmp_path, 1, 0, 0, 0, 1), "trainer.warmup_steps=2", "filter=zero_std", "trainer.save_every=1"]
    command = [
        sys.executable,
        "-m",
        "grpo_cli.cli",
        "train",
        *TINY,
        f"run.dir={run}",
        "trainer.nproc_per_node=2",
        *given,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tokens = [[completion["token_ids"] for completion in group["completions"]] for group in groups(gap)]
    assert [[completion["token_ids"] for completion in group["completions"]] for group in groups(run)] == tokens
    assert [group["prompt_id"] for group in groups(run)] == [f"row-{index}" for index in range(5)]
    alone, two = ([measured(row) for row in metrics(directory)] for directory in (gap, run))
    for mine, theirs in zip(two, alone, strict=True):
        assert mine == {key: pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in theirs.items()}
    for step in (1, 2, 3):
        directory = run / "checkpoints" / f"step_{step:06d}"
        assert manifest.problems(directory) == []
        assert len(list(directory.glob("slices_*.safetensors"))) == 2
    assert [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step_")] == []


# E09, J02, J06, K03, K04: stopped anywhere, resumed exactly

LONG = (
    *("trainer.steps=6", "trainer.lr_schedule=cosine", "trainer.warmup_steps=2", "trainer.updates_per_step=2"),
    *("trainer.eval_every=2", "eval.limit=2", "trainer.save_every=3", "data.train_size=5", "data.eval_size=4"),
    *("filter=dynamic_sampling", "filter.surplus=carry", "filter.max_rounds=4"),
    *("loss.correction.mode=truncate", "loss.correction.high=2.0", "logger.wandb.mode=offline"),
    "reward.terms=[{name: regex, weight: 1.0, pattern: '[A-Za-z]'}]",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Six steps without a pause: three passes over the rows, some groups dropped, some carried to the next step."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        FakeWandb().install(patch)
        assert train(directory, *LONG) == 0
    return directory


def test_e09_the_run_of_the_comparison_drops_carries_and_crosses_epochs(whole):
    found = metrics(whole)
    assert sum(row.get("groups/dropped_count", 0) for row in found) > 0
    assert found[3]["step"] == 3
    assert found[3]["groups/carried_count"] > 0  # in the checkpoint that most of the runs below resume from
    assert max(row.get("groups/rounds_count", 0) for row in found) > 1
    assert len(groups(whole)) > 10
    assert len({group["prompt_id"] for group in groups(whole)}) == 5


def signal_at(monkeypatch, step: int, stage: str) -> None:
    """SIGTERM when `stage` of `step` begins; `second round` is a stage of its own here."""

    def at(now: int, begun: str) -> None:
        if (now, begun) == (step, stage):
            stop._signum = signal.SIGTERM

    rounds: dict[int, int] = {}
    generate = SyncSource._round

    def counted(self, numbered, number, clock):
        rounds[number] = rounds.get(number, 0) + 1
        if rounds[number] == 2 and number >= step:
            at(step, "second round")
        return generate(self, numbered, number, clock)

    monkeypatch.setattr(SyncSource, "_round", counted)
    monkeypatch.setattr(stop, "rank_file", StageFile(at))


@pytest.mark.parametrize(
    ("step", "stage", "saved"),
    [
        (4, "rollout", 3),
        (1, "second round", None),
        (2, "evaluation", 2),
        (3, "record", 3),
        (3, "checkpoint", 3),
    ],
)
def test_k03_k04_e09_stopped_anywhere_it_resumes_exactly(whole, tmp_path, monkeypatch, step, stage, saved):
    wandb = FakeWandb().install(monkeypatch)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(patch, step, stage)
        assert train(run, *LONG) == 128 + signal.SIGTERM
    assert state(run)["status"] == "stopped"
    assert manifest.problems(last_checkpoint(run)) == []
    assert saved is None or last_checkpoint(run).name == f"step_{saved:06d}"
    assert train(run, *LONG) == 0
    assert groups(run) == groups(whole)  # prompts, tokens, rewards, logprobs, advantages
    assert [measured(row) for row in metrics(run)] == [
        # An evaluation that the stop cut short is not made up for.
        {
            key: value
            for key, value in measured(row).items()
            if stage != "evaluation" or row["step"] != step or not key.startswith("eval/")
        }
        for row in metrics(whole)
    ]
    one, other = (manifest.read(last_checkpoint(directory))["files"] for directory in (run, whole))
    for name in ("slices_00000.safetensors", "rng_00000.json"):
        assert one[name] == other[name]
    sources = [json.loads((last_checkpoint(directory) / manifest.STATE).read_text()) for directory in (run, whole)]
    assert sources[0]["run"]["source"] == sources[1]["run"]["source"]
    first, second = wandb.runs
    assert first.options["id"] == second.options["id"] == sources[0]["run"]["wandb_id"]
    assert (first.ends, second.ends) == ([143], [0])
    sent = [number for wandb_run in wandb.runs for number, _ in wandb_run.rows]
    assert sent == sorted(set(sent))
    assert sent[-1] == 6


def test_i14_the_same_command_goes_on_and_another_directory_says_where_it_looked(tmp_path, capsys):
    run = tmp_path / "run"
    assert train(run, "trainer.steps=2", "trainer.save_every=1") == 0
    assert train(run, "trainer.steps=3", "trainer.save_every=1") == 0
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    assert f"Resumed after step 2 from {run}/checkpoints/step_000002" in capsys.readouterr().out
    assert train(tmp_path / "other", "trainer.steps=1") == 0
    told = capsys.readouterr().out
    assert f"A fresh start: no whole checkpoint in {tmp_path}/other/checkpoints" in told
    assert "run.dir=DIR" in told


# I12: a run directory is all that a restart needs


def test_e06_a_step_that_was_not_finite_is_not_an_empty_one(tmp_path):
    """1e39 is no float32: the update is refused. `filter.max_empty_steps` counts steps with nothing to train on."""
    terms = r'reward.terms=[{name: regex, weight: 1e39, pattern: "\d"}]'
    guards = ["filter=none", "filter.max_empty_steps=1", "trainer.steps=1", "trainer.max_nonfinite_steps=2"]
    assert train(tmp_path, terms, "advantage=dr_grpo", *guards) == 0
    (row,) = metrics(tmp_path)
    assert (row["updates/nonfinite_count"], row["updates/applied_count"]) == (1, 0)


def test_i12_a_run_goes_on_from_its_directory_wherever_it_is_called(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    rows(tmp_path / "here", 1, 1, 1, 1)
    given = ["data=jsonl", "data.train=./rows.jsonl", "data.max_prompt_tokens=64", "trainer.steps=1"]
    python = "reward.terms=[{name: python, weight: 1.0, path: term.py, function: alternate}]"
    assert train(tmp_path / "run", *given, python, "trainer.save_every=1") == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    resolved = RunDir(tmp_path / "run").read_config()
    assert resolved["data"]["train"] == f"{tmp_path}/here/rows.jsonl"
    resolved["trainer"]["steps"] = 2
    assert execute(resolved, tmp_path / "run") == 0
    assert [row["reward"] for row in metrics(tmp_path / "run")] == [0.5, 0.5]
    assert list((tmp_path / "elsewhere").iterdir()) == []


# J05: a sweep with W&B


def test_j05_every_job_of_a_sweep_is_a_wandb_run_of_its_own(tmp_path, monkeypatch, capsys):
    wandb = FakeWandb().install(monkeypatch)
    monkeypatch.setattr("grpo_cli.launch.launch", lambda resolved, run_dir: execute(resolved, Path(run_dir)))
    jobs = ["rollout.num_generations=2,4", "reward.terms.0.function=alternate,faulty"]
    given = ["+experiment=smoke", *rows(tmp_path, 1, 1, 1, 1), term(tmp_path, "alternate", "raise OSError('gone')")]
    sizes = ["trainer.prompts_per_step=2", "rollout.max_new_tokens=4", "logger.wandb.mode=offline"]
    assert cli.main(["train", "-m", f"run.dir={tmp_path}/R", *given, *sizes, *jobs]) == 1
    assert [state(tmp_path / "R" / str(n))["exit_code"] for n in range(4)] == [0, 1, 0, 1]
    assert [run.ends for run in wandb.runs] == [[0], [1], [0], [1]]
    assert len({run.options["id"] for run in wandb.runs}) == 4
    assert [run.options["dir"] for run in wandb.runs] == [f"{tmp_path}/R/{n}" for n in range(4)]
    assert "Sweep: 2 of 4 jobs done." in capsys.readouterr().out
