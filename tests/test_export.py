"""Model directories that transformers reads back: of a policy, and of a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_cli import export
from grpo_cli.batch import pack
from grpo_cli.checkpoint import manifest
from grpo_cli.checkpoint import store as checkpoint
from grpo_cli.errors import ConfigError, RunError
from grpo_cli.files.rundir import RunDir
from grpo_cli.process import ranks
from grpo_cli.trainer.policy import Policy
from tests import tiny


@pytest.fixture(scope="module")
def alone() -> ranks.Ranks:
    return ranks.start()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("llama"), "llama-tied")


def trained(llama: Path, alone: ranks.Ranks, *overrides: str) -> Policy:
    policy = Policy(tiny.config(f"model.path={llama}", *overrides), alone)
    batch = pack(tiny.make_groups(), policy.cfg, alone)
    policy.add_logprobs(batch)
    policy.update(batch, 1)
    return policy


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, use_safetensors=True).state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_final_model_and_exported_checkpoint_are_the_policy(
    stage: int, llama: Path, alone: ranks.Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = trained(llama, alone, f"trainer.zero_stage={stage}", "data.chat_template='{{messages[0].content}}'")
    expected = {name: tensor.clone() for name, tensor in policy.gathered_parameters()}
    run_dir = RunDir.create(tmp_path / "run")
    checkpoint.save(policy.cfg, run_dir, alone, policy, {"step": 1, "policy": {}})
    export.save_model(policy, run_dir.model, alone)
    assert export.main([str(run_dir.path), str(tmp_path / "out")]) == 0
    for directory in (run_dir.model, tmp_path / "out"):
        found = weights(directory)
        assert set(expected) <= set(found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert tokenizer("w5")["input_ids"]
        assert tokenizer.chat_template == "{{messages[0].content}}"  # the one that it was trained behind
        assert (directory / "generation_config.json").exists()
        assert "grpo" not in (directory / "config.json").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert not torch.equal(expected["model.norm.weight"], weights(llama)["model.norm.weight"])


def test_adapters_are_merged(llama: Path, alone: ranks.Ranks, tmp_path: Path) -> None:
    policy = trained(llama, alone, "model.lora={rank: 4, alpha: 8, dropout: 0.0, target_modules: [q_proj]}")
    run_dir = RunDir.create(tmp_path / "run")
    checkpoint.save(policy.cfg, run_dir, alone, policy, {"step": 1, "policy": {}})
    expected = {name: tensor.clone() for name, tensor in policy.gathered_parameters()}
    export.main([str(run_dir.path), str(tmp_path / "out")])
    found = weights(tmp_path / "out")
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
    changed = [name for name in expected if not torch.equal(found[name], weights(llama)[name])]
    assert changed
    assert all("q_proj" in name for name in changed)


def test_large_models_come_in_several_files(
    llama: Path, alone: ranks.Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trained(llama, alone)
    monkeypatch.setattr(export, "SHARD_BYTES", 50_000)
    export.save_model(policy, tmp_path / "model", alone)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    found = weights(tmp_path / "model")
    assert all(torch.equal(found[name], tensor) for name, tensor in policy.gathered_parameters())


def test_full_disk_keeps_the_older_model(
    llama: Path, alone: ranks.Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trained(llama, alone)
    export.save_model(policy, tmp_path / "model", alone)
    before = (tmp_path / "model/model.safetensors").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="disk is full"):
        export.save_model(policy, tmp_path / "model", alone)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model/model.safetensors").read_bytes() == before


def test_wrong_use(llama: Path, alone: ranks.Ranks, tmp_path: Path) -> None:
    policy = trained(llama, alone)
    run_dir = RunDir.create(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        export.main([str(run_dir.path), str(tmp_path / "out")])
    directory = checkpoint.save(policy.cfg, run_dir, alone, policy, {"step": 1, "policy": {}})
    with pytest.raises(ConfigError, match="no whole checkpoint of step 2"):
        export.main([str(run_dir.path), str(tmp_path / "out"), "--step", "2"])
    with pytest.raises(ConfigError, match="exists already"):
        export.main([str(run_dir.path), str(tmp_path)])
    (directory / manifest.STATE).write_text("{}")
    with pytest.raises(ConfigError, match=r"state\.json has 2 bytes instead of"):
        export.main([str(run_dir.path), str(tmp_path / "out"), "--step", "1"])
