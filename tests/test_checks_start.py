"""Findings at run start: each in the form of the others, all at once, before weights, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
from check_helpers import config_of, with_values

from grpo_cli.checks import RULES, check, start
from grpo_cli.checks.overrides import read_first
from grpo_cli.checks.start import devices, engine, model, resume, rundir
from grpo_cli.checks.start.report import Report
from grpo_cli.compose import absolute
from grpo_cli.files.rundir import RunDir
from grpo_cli.model.builtin import locate
from grpo_cli.schema import Config

LORA = ["model.lora={rank:4,alpha:8.0,dropout:0.0,target_modules:[q_proj,v_proj]}"]
VLLM = ["rollout=vllm", "rollout.weight_sync=nccl", "rollout.devices=[1]"]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A typed config on the tiny model, with a run directory of its own and no accelerator."""
    monkeypatch.setattr(devices, "accelerators", lambda: 0)
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: True)

    def make(*overrides: str) -> Config:
        resolved = config_of(["model=tiny", f"run.dir={tmp_path}/run", "trainer.lr=1e-5", *overrides])
        typed, findings = check(absolute(resolved, tmp_path))
        assert typed is not None, findings
        return typed

    return make


def found_by(part, cfg):
    report = Report(cfg)
    part(cfg, report)
    return [(finding.rule, finding.severity, finding.keys[0]) for finding in report.findings]


def fix_of(part, cfg):
    report = Report(cfg)
    part(cfg, report)
    [finding] = report.findings
    assert finding.keys == tuple(dict.fromkeys(finding.keys))
    assert RULES[finding.rule].severity == finding.severity
    return finding.fix


def test_a_config_that_can_start_has_no_finding(make, tmp_path):
    assert start.check(make()) == []
    assert start.check_data(make()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_model_hides_no_mistake_in_the_data_or_elsewhere(make, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2", "answer": "4"}\nnot json\n')
    cfg = make(
        "data=jsonl",
        "data.train=rows.jsonl",
        "model.path=./nothing-here",
        "trainer.offload_optimizer=true",
        "run.dir=/proc/nowhere",
    )
    assert [finding.rule for finding in start.check(cfg)] == [
        "data_rows_valid",
        "data_has_keys",
        "offload_needs_an_accelerator",
        "model_readable",
        "run_dir_writable",
    ]
    assert [finding.rule for finding in start.check_data(cfg)] == ["data_rows_valid", "data_has_keys", "model_readable"]
    assert "run_dir_writable" not in [finding.rule for finding in start.check(cfg, "eval")]


def test_a_model_that_asks_for_its_own_code_is_refused_and_its_code_not_run(make, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(locate("builtin:tiny"), folder)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'sentinel')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    for model_type in ("llama", "mine"):
        asked = config | {
            "model_type": model_type,
            "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"},
        }
        (folder / "config.json").write_text(json.dumps(asked))
        [finding] = start.check(make("model.path=model"))
        assert finding.rule == "model_readable"
        assert "mine.py" in finding.message
        assert not (tmp_path / "sentinel").exists()


def test_a_model_without_safetensors_is_refused_before_anything_is_loaded(make, tmp_path):
    shutil.copytree(locate("builtin:tiny"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    [finding] = start.check(make("model.path=model"))
    assert finding.rule == "model_readable"
    assert "but pytorch_model.bin: a pickle can run code and is never read" in finding.message


def test_tokenizer_code_counts_too(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tok.Slow", None]}}))
    assert model.own_code(tmp_path) is None  # nothing there that could run
    (tmp_path / "tok.py").touch()
    assert model.own_code(tmp_path) == "tok.py"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["org/repo--tok2.Slow"]}})
    )
    assert model.own_code(tmp_path) == "tok2.py"


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["rollout.max_new_tokens=4033", "trainer.micro_batch_tokens=5000"], "rollout.max_new_tokens=4032"),
        (["rollout.max_model_len=5000"], "rollout.max_model_len=4096"),
        (
            ["data.max_prompt_tokens=5000", "trainer.micro_batch_tokens=6000"],
            "data.max_prompt_tokens=2048",
        ),
        (["eval.max_new_tokens=5000", "trainer.eval_every=1"], "eval.max_new_tokens=4032"),
        (
            ["rollout.max_model_len=5000", "eval.max_new_tokens=4900", "trainer.eval_every=1"],
            "rollout.max_model_len=4096 eval.max_new_tokens=4032",
        ),
    ],
)
def test_context_fits_model(make, overrides, fix):
    """The tiny model has 4096 positions."""
    cfg = make(*overrides)
    assert found_by(model.check, cfg) == [("context_fits_model", "error", "rollout.max_model_len")]
    assert fix_of(model.check, cfg) == fix
    mended = with_values(cfg.model_dump(), read_first(fix))
    typed, errors = check(mended)
    assert [finding for finding in errors if finding.severity == "error"] == []
    assert found_by(model.check, typed) == []


def test_what_is_not_evaluated_need_not_fit_the_model(make):
    cfg = make("eval.max_new_tokens=5000")
    assert found_by(model.check, cfg) == []
    report = Report(cfg, "eval")
    model.check(cfg, report)
    [finding] = report.findings
    assert (finding.rule, finding.fix) == ("context_fits_model", "eval.max_new_tokens=4032")
    assert "data.max_prompt_tokens + eval.max_new_tokens = 5064 tokens" in finding.message


def test_attention_installed(make):
    cfg = make("model.attn_implementation=flash_attention_2", "model.dtype=bfloat16")
    assert found_by(model.check, cfg) == [("attention_installed", "error", "model.attn_implementation")]
    assert fix_of(model.check, cfg) == "model.attn_implementation=sdpa, or pip install flash-attn"
    assert fix_of(model.check, make("model.attn_implementation=spda")) == "model.attn_implementation=sdpa"


def test_lora_targets_exist(make):
    assert found_by(model.check, make(*LORA)) == []
    cfg = make(*LORA, "model.lora.target_modules=[q_proj,wq,lm_head]")
    assert found_by(model.check, cfg) == [("lora_targets_exist", "error", "model.lora.target_modules")]
    assert fix_of(model.check, cfg) == "model.lora.target_modules=[q_proj]"
    everything = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
    assert (
        fix_of(model.check, make(*LORA, "model.lora.target_modules=[wq]")) == f"model.lora.target_modules={everything}"
    )


def test_lora_reference_is_start_policy(make, tmp_path):
    shutil.copytree(locate("builtin:tiny"), tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    cfg = make(*LORA, "model.path=model", "loss.kl_coef=0.01")
    report = Report(cfg)
    model._check_reference(cfg, report)
    assert [(finding.rule, finding.fix) for finding in report.findings] == [
        ("lora_reference_is_start_policy", "loss.kl_coef=0, or merge the adapter into model.path")
    ]
    for other in (make(*LORA, "model.path=model"), make("model.path=model", "loss.kl_coef=0.01")):
        report = Report(other)
        model._check_reference(other, report)
        assert report.findings == []


def test_devices_without_an_accelerator(make):
    assert found_by(devices.check, make()) == []
    assert fix_of(devices.check, make("trainer.offload_optimizer=true")) == "trainer.offload_optimizer=false"
    assert fix_of(devices.check, make("rollout=vllm", "rollout.sleep_level=1")) == "rollout.sleep_level=0"
    assert fix_of(devices.check, make("rollout=vllm_server", "rollout.weight_sync=nccl")) == "rollout.weight_sync=disk"
    remote = make("rollout=vllm_server", "rollout.weight_sync=nccl", "rollout.server_url=https://gpu7:8000")
    assert found_by(devices.check, remote) == []


def test_several_nodes_need_a_meeting_point(make):
    for endpoint in ("127.0.0.1:29500", "localhost"):
        assert found_by(devices.check, make("trainer.nnodes=2", f"trainer.rdzv_endpoint={endpoint}")) == []
    for endpoint in ("null", "nowhere.invalid:29500", "http://127.0.0.1:29500", "127.0.0.1:port", "127.0.0.1:0"):
        cfg = make("trainer.nnodes=2", f"trainer.rdzv_endpoint='{endpoint}'" if endpoint != "null" else "run.seed=1")
        assert found_by(devices.check, cfg) == [("nodes_have_a_meeting_point", "error", "trainer.rdzv_endpoint")]
        assert fix_of(devices.check, cfg).endswith(", or trainer.nnodes=1")


def test_an_adapter_needs_its_package(make, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    assert ("lora_package_installed", "error", "model.lora") in found_by(model.check, make(*LORA))


def test_bfloat16_on_a_processor_without_it_is_a_warning(make, monkeypatch):
    cfg = make("model.dtype=bfloat16")
    assert found_by(devices.check, cfg) == []
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: False)
    assert found_by(devices.check, cfg) == [("bfloat16_is_emulated", "warning", "model.dtype")]
    assert fix_of(devices.check, cfg) == "model.dtype=float32 rollout.dtype=float32"
    assert found_by(devices.check, make("rollout=vllm", "rollout.dtype=bfloat16")) != []
    assert found_by(devices.check, make("model.dtype=float32")) == []


def test_devices_with_accelerators(make, monkeypatch):
    monkeypatch.setattr(devices, "accelerators", lambda: 2)
    monkeypatch.setattr(devices, "lowest_capability", lambda: 7.5)
    assert found_by(devices.check, make("trainer.nproc_per_node=2")) == []
    assert fix_of(devices.check, make("trainer.nproc_per_node=4")) == "trainer.nproc_per_node=2"
    assert found_by(devices.check, make(*VLLM)) == []
    assert found_by(devices.check, make(*VLLM, "rollout.devices=[1,2]")) == [
        ("processes_fit_devices", "error", "trainer.nproc_per_node")
    ]
    assert fix_of(devices.check, make("model.dtype=bfloat16")) == "model.dtype=float32 rollout.dtype=float32"
    assert found_by(devices.check, make("trainer.offload_optimizer=true")) == []
    assert found_by(devices.check, make("rollout=vllm_server", "rollout.weight_sync=nccl")) == []


def test_a_server_of_the_runs_own_needs_a_device_beside_the_trainers(make, monkeypatch):
    monkeypatch.setattr(devices, "accelerators", lambda: 4)
    monkeypatch.setattr(devices, "lowest_capability", lambda: 9.0)
    nccl = ("rollout=vllm_server", "rollout.weight_sync=nccl")
    assert found_by(devices.check, make(*nccl, "trainer.nproc_per_node=3")) == []
    full = make(*nccl, "trainer.nproc_per_node=4")
    assert found_by(devices.check, full) == [("nccl_sync_needs_two_devices", "error", "rollout.weight_sync")]
    fix = "trainer.nproc_per_node=3, or rollout.weight_sync=disk, or rollout.weight_sync=ipc"
    assert fix_of(devices.check, full) == fix
    given = make(*nccl, "trainer.nproc_per_node=4", "rollout.server_url=http://localhost:8000")
    assert found_by(devices.check, given) == []


def test_engine_installed(make, monkeypatch):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    assert found_by(engine.check, make()) == []
    assert found_by(engine.check, make("rollout=vllm")) == [("engine_installed", "error", "rollout.name")]
    assert found_by(engine.check, make("rollout=vllm_server")) == [("engine_installed", "error", "rollout.name")]


def test_wandb_installed(make, monkeypatch):
    monkeypatch.setattr(rundir.importlib.util, "find_spec", lambda name: None)
    assert found_by(rundir.check, make()) == []
    assert fix_of(rundir.check, make("logger.wandb.mode=offline")) == "logger.wandb.mode=disabled, or pip install wandb"


def test_run_dir_has_room(make, monkeypatch):
    """The tiny model: 2 layers of 147,712, 261 x 128 embeddings, a norm of 128; 4 bytes each, 12 of optimizer."""
    size = 16 * 328_960
    assert rundir.checkpoint_bytes(make()) == size
    monkeypatch.setattr(rundir.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 4 * size))
    assert found_by(rundir.check, make("trainer.keep_checkpoints=3")) == []
    assert fix_of(rundir.check, make("trainer.keep_checkpoints=4")).startswith("trainer.keep_checkpoints=3, or")
    assert found_by(rundir.check, make("trainer.keep_checkpoints=null")) == []


def test_run_dir_is_fresh(make):
    cfg = make("trainer.resume=never")
    home = RunDir(cfg.run.dir)
    assert found_by(resume.check, cfg) == []
    home.path.mkdir()
    home.state_path.write_text("{}")
    assert found_by(resume.check, make("trainer.resume=auto")) == []
    assert found_by(resume.check, cfg) == [("run_dir_is_fresh", "error", "trainer.resume")]
    assert fix_of(resume.check, cfg).startswith("trainer.resume=auto, or ")
    home.lock()
    try:
        assert found_by(resume.check, make("trainer.resume=auto")) == [("run_dir_is_fresh", "error", "run.dir")]
    finally:
        home.unlock()
    assert found_by(resume.check, make("trainer.resume=auto")) == []


def test_a_checkpoint_that_is_not_whole_is_refused_before_weights(make, tmp_path):
    (tmp_path / "step_000004").mkdir()
    (tmp_path / "step_000004" / "state.json").write_text("{}")
    cfg = make(f"trainer.resume={tmp_path}/step_000004")
    assert [finding.rule for finding in start.check(cfg)] == ["resume_checkpoint_complete"]
    assert start.check(cfg, "eval") == []
