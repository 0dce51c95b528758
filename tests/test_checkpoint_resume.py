"""What resuming would mean, from files alone: nothing here loads a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from configs import make_config

from grpo_cli.checkpoint import manifest, resume
from grpo_cli.checks.start import resume as start
from grpo_cli.checks.start.report import Report
from grpo_cli.errors import Finding
from grpo_cli.files.rundir import RunDir


def fake_checkpoint(run_dir: RunDir, step: int = 4, *saved: str) -> Path:
    """A whole checkpoint without tensors, of the default config with the overrides `saved`."""
    directory = run_dir.checkpoints / manifest.directory_name(step)
    directory.mkdir(parents=True)
    RunDir(directory).write_config(make_config(*saved).model_dump())
    run = {"step": step, "source": {"data": {"fingerprint": "rows-a"}}}
    (directory / manifest.STATE).write_text(json.dumps({"run": run}))
    files = {
        path.name: {"size": path.stat().st_size, "sha256": manifest.sha256(path)}
        for path in sorted(directory.iterdir())
    }
    written = {"format": manifest.FORMAT, "step": step, "files": files}
    (directory / manifest.NAME).write_text(json.dumps(written))
    return directory


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(tmp_path / "run")
    fake_checkpoint(run_dir)
    return run_dir


def findings(run_dir: RunDir, *overrides: str, fingerprint: str | None = None) -> list[Finding]:
    return resume.findings(make_config(f"run.dir='{run_dir.path}'", *overrides), fingerprint)


def test_the_same_config_is_silent(run_dir: RunDir) -> None:
    assert findings(run_dir, fingerprint="rows-a") == []
    assert findings(run_dir, f"trainer.resume='{run_dir.checkpoints}/step_000004'") == []


def test_more_steps_are_silent_fewer_are_told(run_dir: RunDir) -> None:
    assert findings(run_dir, "trainer.steps=200") == []
    [fewer] = findings(run_dir, "trainer.steps=50")
    assert (fewer.rule, fewer.severity) == ("resume_config_unchanged", "warning")
    assert "trainer.steps: 100 -> 50" in fewer.message


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_another_length_is_mathematics_where_the_rate_decays_over_it(tmp_path: Path, schedule: str) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    decays = f"trainer.lr_schedule={schedule}"
    fake_checkpoint(run_dir, 4, decays)
    [found] = findings(run_dir, decays, "trainer.steps=200")
    assert (found.rule, found.severity) == ("resume_config_unchanged", "error")
    assert f"trainer.steps: 100 -> 200. {decays} spreads the learning rate" in found.message
    assert found.fix == "trainer.steps=100, or trainer.allow_config_change=true"
    [allowed] = findings(run_dir, decays, "trainer.steps=200", "trainer.allow_config_change=true")
    assert allowed.severity == "warning"
    [epochs] = findings(run_dir, decays, "trainer.steps=null", "trainer.epochs=2")
    assert epochs.severity == "error"


def test_harmless_keys_pass_with_a_warning(run_dir: RunDir) -> None:
    [found] = findings(run_dir, "trainer.zero_stage=3", "logger.console=off")
    assert (found.rule, found.severity) == ("resume_config_unchanged", "warning")
    assert "logger.console: auto -> off, trainer.zero_stage: 2 -> 3" in found.message


def test_keys_of_the_mathematics_need_to_be_allowed(run_dir: RunDir) -> None:
    [found] = findings(run_dir, "trainer.lr=5e-6", "rollout.num_generations=4")
    assert (found.rule, found.severity) == ("resume_config_unchanged", "error")
    assert "rollout.num_generations: 8 -> 4, trainer.lr: 1e-06 -> 5e-06" in found.message
    assert found.fix == "rollout.num_generations=8 trainer.lr=1e-6, or trainer.allow_config_change=true"
    [allowed] = findings(run_dir, "trainer.lr=5e-6", "rollout.num_generations=4", "trainer.allow_config_change=true")
    assert allowed.severity == "warning"


def test_another_option_of_a_group_is_told_in_words(run_dir: RunDir) -> None:
    [found] = findings(run_dir, "reward.overlong={max_tokens: 8, buffer_tokens: 4, penalty: 1.0}")
    assert "reward.overlong: null -> absent" in found.message
    assert found.fix == "Restore the listed keys, or trainer.allow_config_change=true"


def test_other_model_or_other_data_is_another_run(run_dir: RunDir) -> None:
    [found] = findings(run_dir, "model.path=/other", fingerprint="rows-b")
    assert (found.rule, found.severity) == ("resume_matches_run", "error")
    assert "builtin:smollm2-135m -> /other" in found.message
    assert "data.train" in found.keys


def test_auto_takes_the_newest_whole_one(run_dir: RunDir) -> None:
    newest = fake_checkpoint(run_dir, 8)
    cfg = make_config(f"run.dir='{run_dir.path}'")
    assert resume.find(cfg) == newest
    (newest / manifest.NAME).unlink()
    assert resume.find(cfg) == run_dir.checkpoints / "step_000004"
    assert resume.find(make_config(f"run.dir='{run_dir.path}'", "trainer.resume=never")) is None


def test_a_config_is_refused_for_whole_checkpoints_only(run_dir: RunDir) -> None:
    """The newest is of another learning rate; once a byte of it has changed, it is the older one that counts."""
    newest = fake_checkpoint(run_dir, 8, "trainer.lr=5e-6")
    [found] = findings(run_dir)
    assert (found.severity, "trainer.lr: 5e-06 -> 1e-06" in found.message) == ("error", True)
    state = newest / manifest.STATE
    state.write_text(state.read_text().replace("rows-a", "rows-b"))
    assert findings(run_dir) == []


def test_no_changed_byte_of_a_manifest_gets_out(run_dir: RunDir) -> None:
    """Every byte changed, and every byte lost: a reason, or a manifest that says the same; never an exception."""
    older, newest = run_dir.checkpoints / "step_000004", fake_checkpoint(run_dir, 8)
    cfg = make_config(f"run.dir='{run_dir.path}'")
    path = newest / manifest.NAME
    whole = path.read_bytes()
    said = manifest.read(newest)
    assert said is not None
    for place in range(len(whole)):
        for byte in (b"", bytes([whole[place] ^ 1]), bytes([whole[place] ^ 0x80])):
            path.write_bytes(whole[:place] + byte + whole[place + 1 :])
            if manifest.problems(newest):
                assert resume.find(cfg) == (newest if manifest.quick_problems(newest) == [] else older)
            else:
                assert manifest.read(newest)["files"] == said["files"]  # type: ignore[index]


def test_no_changed_byte_of_a_config_gets_out(run_dir: RunDir) -> None:
    """The parent reads the config of a checkpoint before anybody has looked at its hash."""
    newest = fake_checkpoint(run_dir, 8)
    path = newest / manifest.CONFIG
    whole = path.read_bytes()
    for place in range(0, len(whole), 80):
        for bit in (1, 0x80):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            assert all(found.severity == "warning" for found in findings(run_dir))


def test_damaged_path_is_an_error_that_names_a_whole_one(run_dir: RunDir) -> None:
    newest = fake_checkpoint(run_dir, 8)
    state = newest / manifest.STATE
    state.write_text(state.read_text().replace("rows-a", "rows-b"))
    [found] = findings(run_dir, f"trainer.resume='{newest}'")
    assert (found.rule, found.severity) == ("resume_checkpoint_complete", "error")
    assert "state.json has another content" in found.message
    assert found.fix == f"trainer.resume={run_dir.checkpoints}/step_000004"


def test_directory_of_pickles_is_not_plain_data(run_dir: RunDir, tmp_path: Path) -> None:
    foreign = tmp_path / "global_step4"
    foreign.mkdir()
    (foreign / "mp_rank_00_model_states.pt").write_bytes(b"\x80\x04.")
    rules = [found.rule for found in findings(run_dir, f"trainer.resume='{foreign}'")]
    assert rules == ["checkpoint_is_plain_data", "resume_checkpoint_complete"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b.json", "state.pkl", ".hidden.json"])
def test_names_in_a_manifest_stay_in_the_directory(run_dir: RunDir, name: str) -> None:
    directory = run_dir.checkpoints / "step_000004"
    written = json.loads((directory / manifest.NAME).read_text())
    written["files"][name] = {"size": 0, "sha256": ""}
    (directory / manifest.NAME).write_text(json.dumps(written))
    assert any("no name of a checkpoint's file" in problem for problem in manifest.quick_problems(directory))


def test_run_directory_in_use_or_used(run_dir: RunDir) -> None:
    def rules(*overrides: str) -> list[str]:
        report = Report(make_config(f"run.dir='{run_dir.path}'", *overrides))
        start.check(report.cfg, report)
        return [finding.rule for finding in report.findings]

    assert rules("trainer.resume=never") == []
    run_dir.begin(seed=1, steps=1)
    assert rules("trainer.resume=never") == ["run_dir_is_fresh"]
    assert rules() == []
    run_dir.lock()
    assert rules() == ["run_dir_is_fresh"]
    run_dir.unlock()
