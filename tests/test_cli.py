"""The command line: exit codes, one line an error, help on one screen, and what happens before a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_cli import __version__, cli
from grpo_cli.errors import ConfigError, Finding, GuardStop, RunError, SignalStop
from grpo_cli.options import conf_dir, read_groups

GRPO = [sys.executable, "-m", "grpo_cli.cli"]
SOURCE = str(Path(cli.__file__).resolve().parents[1])


def grpo(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with the sources that are tested."""
    env = options.pop("env", {**os.environ, "PYTHONPATH": SOURCE})
    return subprocess.run([*GRPO, *arguments], capture_output=True, text=True, env=env, timeout=60, **options)


def validate(capsys, *overrides: str) -> dict:
    """What `grpo validate --json` prints; its exit code must agree with it."""
    code = cli.main(["validate", "--json", *overrides])
    printed = json.loads(capsys.readouterr().out)
    assert code == (0 if printed["ok"] else 2)
    assert set(printed) == {"ok", "errors", "warnings", "derived"}
    for finding in printed["errors"] + printed["warnings"]:
        assert set(finding) == {"rule", "keys", "message", "fix"}
    return printed


def errors(capsys, *overrides: str) -> list[tuple[str, str]]:
    """(rule, first key) of every error."""
    return [(error["rule"], error["keys"][0]) for error in validate(capsys, *overrides)["errors"]]


# -- help, version, usage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["validate", "--help"], ["plan", "--help"]])
def test_help_fits_a_screen_and_lists_what_conf_holds(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    groups = read_groups([conf_dir()])
    for experiment in groups.options["experiment"]:
        assert experiment in text
    assert "grpo train -m +experiment=grpo" in text
    if arguments[0] != "--help":
        for group in groups.defaults:
            for option in groups.options[group]:
                assert group in text
                assert option in text or option == "default"
    else:
        assert all(command in text for command in cli.COMMANDS)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"grpo {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "grpo train"),
        (["loss=dapo"], "grpo train loss=dapo"),
        (["train", "--loss=dapo"], "loss=dapo"),
        (["validate", "--jsn"], "--json"),
        (["validate", "--explain", "kl_in_reward_needs_prev_logprob"], "kl_in_reward_needs_prev_logprobs"),
        (["validate", "--config-dir", "/no/such"], "/no/such"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(arguments, said, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert said in captured.err.splitlines()[0]
    assert captured.err.startswith("error: ")


def test_no_command_shows_the_help_and_exits_2(capsys):
    assert cli.main([]) == 2
    assert "usage: grpo COMMAND" in capsys.readouterr().err


def test_options_and_overrides_stand_in_any_order(capsys):
    for arguments in (["model=tiny", "--json", "loss=gspo"], ["--json", "model=tiny", "loss=gspo"]):
        cli.main(["validate", *arguments])
        assert json.loads(capsys.readouterr().out)["derived"]["model_dtype"] == "float32"


# -- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConfigError([Finding("a", ("x",), "One.", "x=1"), Finding("b", ("y",), "Two.", "y=1")]), 2),
        (RunError("it broke\nbadly"), 1),
        (GuardStop("no signal"), 3),
        (SignalStop(15), 143),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code_and_one_line_each(raised, code, capsys, monkeypatch):
    def command(_):
        raise raised

    monkeypatch.setattr("grpo_cli.plan.main", command)
    assert cli.main(["plan"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (2 if code == 2 else 0 if code == 130 else 1)
    assert not any("Traceback" in line for line in lines)


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    def command(_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("grpo_cli.plan.main", command)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan"])


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [*GRPO, "--help"], stdout=writer, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCE}
    )
    os.close(writer)
    assert ended.returncode == 141
    assert ended.stderr == b""


# -- validate ---------------------------------------------------------------------------------------------------------

KL = ["+experiment=grpo", "loss.use_kl_in_reward=true", "loss.force_on_policy_ratio=true"]


def test_validate_loads_nothing_heavy_and_names_the_rule():
    code = (
        "import sys; from grpo_cli.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'deepspeed', 'vllm', 'wandb', 'numpy', 'rich', 'httpx'} & set(sys.modules);"
        "print(sorted(heavy)); sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "validate", *KL, "loss.kl_coef=0.01"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert ended.returncode == 2
    assert ended.stdout.strip() == "[]"
    line = next(line for line in ended.stderr.splitlines() if "kl_in_reward_needs_prev_logprobs" in line)
    assert line.startswith("error: ")
    assert "loss.force_on_policy_ratio=false" in line


def test_the_rule_is_silent_without_kl(capsys):
    rules = [rule for rule, _ in errors(capsys, *KL, "loss.kl_coef=0")]
    assert "kl_in_reward_needs_prev_logprobs" not in rules


def test_validate_says_what_would_run(capsys):
    assert cli.main(["validate", "+experiment=smoke"]) == 0
    out = capsys.readouterr().out
    assert "20 steps of 4 prompts x 8 completions = 32 sequences" in out
    assert "reference logprobs: skipped" in out


def test_warnings_are_printed_and_the_exit_code_is_0(capsys):
    assert cli.main(["validate", "+experiment=smoke", "trainer.save_every=50"]) == 0
    captured = capsys.readouterr()
    assert "[intervals_within_run]" in captured.err
    assert captured.err.startswith("warning: ")
    assert captured.out.startswith("ok: ")


def test_json_has_the_derived_numbers(capsys):
    derived = validate(capsys, "+experiment=smoke", "trainer.nproc_per_node=2")["derived"]
    assert (derived["sequences_per_step"], derived["processes"], derived["rollout_dtype"]) == (32, 2, "float32")
    assert set(derived["deepspeed"]) == {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    }


def test_data_reads_the_rows_and_tells_their_mistakes_beside_the_configs(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "2 + 2?", "answer"\n')
    overrides = ["model=tiny", "reward=exact", "data=jsonl", f"data.train={rows}"]
    assert errors(capsys, *overrides) == []
    found = errors(capsys, "--data", *overrides, "trainer.lr=-1")
    assert ("data_rows_valid", "data.train") in found
    assert ("lr_positive", "trainer.lr") in found


def test_json_stays_json_where_the_model_is_made_first(tmp_path):
    """DeepSpeed, imported by the builder, tells its guess of the accelerator on stdout."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    env |= {"PYTHONPATH": SOURCE, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    overrides = ["model=tiny", "reward=exact", "data=jsonl", f"data.train={rows}"]
    ended = grpo("validate", "--json", "--data", *overrides, env=env)
    assert (tmp_path / "cache/grpo/models").is_dir()
    assert json.loads(ended.stdout)["errors"][0]["rule"] == "data_covers_one_step"


def test_explain_prints_the_long_reason(capsys):
    assert cli.main(["validate", "--explain", "kl_in_reward_needs_prev_logprobs"]) == 0
    assert "never computed" in capsys.readouterr().out


def test_an_empty_environment_is_enough(tmp_path):
    ended = grpo("validate", "+experiment=smoke", env={"PYTHONPATH": SOURCE}, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("ok: smoke")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "rule", "key", "fix"),
    [
        ("rolout.num_generations=2", "key_known", "rolout.num_generations", "rollout.num_generations"),
        ("+rolout.num_generations=2", "key_known", "rolout.num_generations", "rollout.num_generations"),
        ("+trainer.lrr=1", "key_known", "trainer.lrr", "trainer.lr"),
        ("++trainer.lrr=1", "key_known", "trainer.lrr", "trainer.lr"),
        ("+x.y=inf", "key_known", "x.y", "~x"),
        ("los=gspo", "key_known", "los", "loss=gspo"),
        ("run.name=???", "value_given", "run.name", "run.name=grpo"),
        ("filter=dynamc_sampling", "option_known", "filter", "filter=dynamic_sampling"),
        ("+experiment=smke", "option_known", "experiment", "experiment=smoke"),
        ("~advantage", "group_present", "advantage", "advantage=grpo"),
        ("trainer.lr=abc", "value_type", "trainer.lr", "trainer.lr="),
        ("rollout.num_generations=true", "value_type", "rollout.num_generations", "rollout.num_generations="),
        ("rollout.num_generations=2,4", "override_parses", "rollout.num_generations", "-m rollout.num_generations=2,4"),
        ("data.train=a#b.jsonl", "override_parses", "data.train", 'data.train="a#b.jsonl"'),
        ("run.name=${oc.env:GRPO_NO_SUCH}", "interpolation_resolves", "run.name", "run.name=grpo"),
    ],
)
def test_one_mistake_is_one_finding(override, rule, key, fix, capsys):
    printed = validate(capsys, override)
    assert [(error["rule"], error["keys"][0]) for error in printed["errors"]] == [(rule, key)]
    assert fix in printed["errors"][0]["fix"]
    if rule != "key_known":
        assert printed["errors"][0]["message"]


def test_a_mistake_in_a_key_is_not_repeated_by_the_keys_that_copy_it(capsys):
    # eval.max_new_tokens is ${rollout.max_new_tokens}
    assert errors(capsys, "rollout.max_new_tokens=abc") == [("value_type", "rollout.max_new_tokens")]
    assert errors(capsys, "~rollout.max_new_tokens") == [("value_given", "rollout.max_new_tokens")]


def test_all_mistakes_of_all_stages_at_once(capsys):
    found = errors(capsys, "loss=gpso", "trainer.lrr=1", "trainer.lr=-1", "data.train=a#b", "rollout.num_generations=1")
    assert {rule for rule, _ in found} >= {
        "override_parses",
        "option_known",
        "key_known",
        "lr_positive",
        "group_advantage_needs_two_generations",
    }


def test_a_missing_model_directory_hides_nothing(capsys):
    found = errors(capsys, "model.path=./nothing-here", "rollout.num_generations=1")
    assert ("group_advantage_needs_two_generations", "rollout.num_generations") in found


def test_errors_on_stderr_are_one_line_each(capsys):
    assert cli.main(["validate", "loss=gpso", "+trainer.lrr=1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(":")[0] for line in captured.err.splitlines()] == ["error", "error", "2 errors"]


def test_text_of_the_user_cannot_drive_the_terminal(capsys):
    assert cli.main(["validate", 'run.name="a\x1b[2J\nb/"']) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\\x1b[2J" in err
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize("experiment", read_groups([conf_dir()]).options["experiment"])
def test_every_shipped_experiment_validates(experiment, capsys):
    assert validate(capsys, f"experiment={experiment}")["ok"]
