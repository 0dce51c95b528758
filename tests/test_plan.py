"""Derived numbers and the memory estimate; every expected number is derived by hand beside it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from grpo_cli import memory, plan
from grpo_cli.compose import load

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
# transformers 5.19.0 on the meta device counts 105,536 for this config and 161,472 for the GPT-2 below; by hand:
# layer: q and o 2*64*64, k and v 2*64*32, mlp 3*64*96, norms 2*64 = 8192 + 4096 + 18432 + 128 = 30848; three: 92544.
# outside: embedding and head 2*101*64 = 12928, last norm 64.
LLAMA_PARAMETERS = 92544 + 12928 + 64


def model_dir(tmp_path, config=LLAMA):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"model.path={tmp_path}"


def config_of(*overrides):
    return load(list(overrides), "plan").require()


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, LLAMA_PARAMETERS),
        ({"tie_word_embeddings": True}, LLAMA_PARAMETERS - 101 * 64),
        ({"head_dim": 32}, LLAMA_PARAMETERS + 3 * (2 * 64 * 64 + 2 * 64 * 32)),
        ({"attention_bias": True}, LLAMA_PARAMETERS + 3 * (64 + 2 * 32 + 64)),
        ({"mlp_bias": True}, LLAMA_PARAMETERS + 3 * (2 * 96 + 64)),
        ({"model_type": "mistral"}, LLAMA_PARAMETERS),
        ({"model_type": "qwen2"}, LLAMA_PARAMETERS + 3 * (64 + 2 * 32)),
        ({"model_type": "qwen3", "head_dim": 16}, LLAMA_PARAMETERS + 3 * 2 * 16),
    ],
)
def test_parameters_of_gated_decoders(changes, parameters):
    assert memory.Shape.of({**LLAMA, **changes}).parameters == parameters


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "vocab_size": 101, "n_positions": 77}


def test_parameters_of_gpt2():
    # layer: 12*64^2 weights, biases 3*64 + 64 + 4*64 + 64, two norms 4*64; outside: (101+77)*64 and a norm of 2*64
    assert memory.Shape.of(GPT2).parameters == 3 * (12 * 4096 + 9 * 64 + 4 * 64) + 178 * 64 + 128 == 161472


def test_adapters_count_inputs_and_outputs():
    # rank 8 on q (64 -> 64) and v (64 -> 32), three layers
    for targets in (["q_proj", "v_proj"], ["self_attn.q_proj", "v_proj"]):
        assert memory.Shape.of(LLAMA).adapter_parameters(8, targets) == 3 * 8 * (128 + 96)
    # c_proj of the attention (64 -> 64) and of the MLP (256 -> 64), or only the first
    assert memory.Shape.of(GPT2).adapter_parameters(8, ["c_proj"]) == 3 * 8 * (128 + 320)
    assert memory.Shape.of(GPT2).adapter_parameters(8, ["h.0.attn.c_proj"]) == 3 * 8 * 128


@pytest.mark.parametrize("config", [{"model_type": "mamba"}, {"model_type": "llama"}, []])
def test_an_unknown_model_is_null_with_a_reason(tmp_path, config):
    estimate = memory.estimate(config_of(model_dir(tmp_path, config)))
    assert estimate["parameters"] is None
    assert estimate["stages"] is None
    assert estimate["reason"]


def test_a_model_that_is_not_here_is_null_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "not in the hub's cache" in memory.estimate(config_of("model=hf", "model.path=org/name"))["reason"]
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--org--name" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    assert memory.estimate(config_of("model=hf", "model.path=org/name"))["parameters"] == LLAMA_PARAMETERS


def test_memory_at_every_stage_and_with_offload(tmp_path):
    where = model_dir(tmp_path)
    estimate = memory.estimate(config_of(where, "trainer.nproc_per_node=4", "model.dtype=bfloat16"))
    n = LLAMA_PARAMETERS  # bf16: 2 bytes of weights, 4 of gradients, 4 of master weights, 8 of Adam; four processes
    states = {stage: (row["weights"], row["gradients"], row["optimizer"]) for stage, row in estimate["stages"].items()}
    assert states == {
        "0": (2 * n, 4 * n, 12 * n),
        "1": (2 * n, 4 * n, 3 * n),
        "2": (2 * n, n, 3 * n),
        "3": (n // 2, n, 3 * n),
    }
    for row in estimate["stages"].values():
        assert row["reference"] == 0
        assert row["host_total"] == 0
        assert row["device_total"] == row["weights"] + row["gradients"] + row["optimizer"] + row["activations"]
    offloaded = memory.estimate(
        config_of(where, "trainer.nproc_per_node=4", "trainer.zero_stage=3", "trainer.offload_optimizer=true")
    )["stages"]
    assert offloaded["0"]["host_total"] == 0
    assert offloaded["3"]["host_total"] == 3 * n
    assert estimate["stages"]["3"]["device_total"] - offloaded["3"]["device_total"] == 3 * n


def test_reference_and_lora(tmp_path):
    where = model_dir(tmp_path)
    kl = memory.estimate(config_of(where, "loss.kl_coef=0.01", "model.dtype=float32"))["stages"]["0"]
    assert kl["reference"] == 4 * LLAMA_PARAMETERS
    lora = "model.lora={rank: 8, alpha: 16.0, dropout: 0.0, target_modules: [q_proj, v_proj]}"
    adapted = memory.estimate(config_of(where, "loss.kl_coef=0.01", "model.dtype=float32", lora))
    trained = 3 * 8 * (128 + 96)
    assert adapted["trained_parameters"] == trained
    row = adapted["stages"]["0"]
    assert (row["weights"], row["gradients"], row["optimizer"]) == (
        4 * (LLAMA_PARAMETERS + trained),
        4 * trained,
        8 * trained,
    )
    assert row["reference"] == 0  # the base model with the adapter off


def test_activations_with_and_without_checkpointing(tmp_path):
    shape = memory.Shape.of(LLAMA)
    where = [model_dir(tmp_path), "model.dtype=float32", "trainer.micro_batch_tokens=1000"]
    layer = 4 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 96)
    logits = 3 * 101 * 4
    assert memory.activations(shape, config_of(*where)) == 1000 * (3 * layer + logits)
    assert memory.activations(shape, config_of(*where, "model.gradient_checkpointing=true")) == 1000 * (
        3 * 64 * 4 + layer + logits
    )


def test_logits_are_chunked_as_the_model_does(tmp_path):
    from grpo_cli.model.network import LOGIT_BYTES

    assert memory.LOGIT_BYTES == LOGIT_BYTES
    shape = memory.Shape.of({**LLAMA, "vocab_size": 10**6, "num_hidden_layers": 0})
    assert memory.activations(shape, config_of(model_dir(tmp_path))) == 3 * LOGIT_BYTES


def test_derived_numbers_in_both_units():
    numbers = plan.derive(
        config_of(
            "trainer.steps=10",
            "trainer.warmup_steps=2",
            "trainer.prompts_per_step=6",
            "rollout.num_generations=8",
            "trainer.updates_per_step=4",
            "trainer.epochs_per_step=2",
            "trainer.nproc_per_node=2",
            "rollout.max_new_tokens=100",
            "data.max_prompt_tokens=28",
        )
    )
    assert numbers["sequences_per_step"] == 48
    assert numbers["sequences_per_update"] == 12
    assert numbers["updates_per_step"] == 8
    assert (numbers["total_steps"], numbers["total_updates"]) == (10, 80)
    assert (numbers["warmup_steps"], numbers["warmup_updates"]) == (2, 16)
    assert numbers["max_tokens_per_step"] == 48 * 128
    assert numbers["max_completion_tokens_per_step"] == 4800
    assert numbers["passes"]["old"]["runs"] is True
    assert numbers["passes"]["reference"]["runs"] is False


@pytest.mark.parametrize("processes", [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_deepspeeds_three_numbers_always_multiply(processes):
    nproc, nodes = processes
    three = plan.derive(config_of(f"trainer.nproc_per_node={nproc}", f"trainer.nnodes={nodes}"))["deepspeed"]
    assert three["train_batch_size"] == (
        three["train_micro_batch_size_per_gpu"] * three["gradient_accumulation_steps"] * nproc * nodes
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rollout_dtype_is_resolved(dtype):
    numbers = plan.derive(config_of("model=tiny", f"model.dtype={dtype}", "rollout.dtype=auto"))
    assert numbers["rollout_dtype"] == dtype
    assert "auto" not in json.dumps(numbers)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("trainer.epochs=2", "trainer.steps=null"), 75),  # 2 * 300 rows / 8 prompts
        (("trainer.epochs=2", "trainer.steps=null", "trainer.prompts_per_step=7"), 86),  # 85.7
        (("trainer.epochs=2", "trainer.steps=null", "filter=dynamic_sampling"), None),
        (("trainer.epochs=2", "trainer.steps=null", "data=jsonl", "data.train=x.jsonl"), None),
    ],
)
def test_steps_of_epochs(overrides, steps):
    numbers = plan.derive(config_of(*overrides))
    assert numbers["total_steps"] == steps
    assert (numbers["total_steps_unknown_because"] is None) == (steps is not None)


def test_plan_prints_passes_memory_and_what_a_warning_changes(capsys):
    overrides = [
        "+experiment=smoke",
        "trainer.prompts_per_step=1",
        "rollout.num_generations=9",
        "trainer.updates_per_step=2",
    ]
    assert plan.main(overrides) == 0
    out = capsys.readouterr().out
    assert "20 steps = 40 updates" in out
    assert "old logprobs: computed. Several updates a step" in out
    assert "sequences_divide_into_updates: following it" in out
    assert "derived.updates_per_step: 2 ->" in out


def test_what_a_warning_changes_is_told_also_where_its_fix_explains_itself(capsys):
    """The fix reads: loss.kl_estimator=k2 (gradient of KL to the reference), or loss.kl_estimator=k3 (...)."""
    assert plan.main(["--json", "+experiment=smoke", "loss.kl_estimator=k1", "loss.kl_coef=0.01"]) == 0
    [warning] = [w for w in json.loads(capsys.readouterr().out)["warnings"] if w["rule"] == "loss_kl_needs_k2_or_k3"]
    assert "(" in warning["fix"].split(", or ")[0]
    assert warning["would_change"] == {"loss.kl_estimator": ["k1", "k2"]}


def test_plan_as_json(capsys):
    assert plan.main(["--json", "+experiment=smoke", "trainer.save_every=50", "trainer.keep_checkpoints=1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is True
    warning = next(finding for finding in printed["warnings"] if finding["rule"] == "intervals_within_run")
    assert warning["would_change"]["trainer.save_every"][0] == 50
    assert printed["derived"]["total_steps"] == 20
    assert set(printed["memory"]) == {"parameters", "trained_parameters", "reason", "stages"}


def test_plan_of_a_wrong_config_exits_2(capsys):
    assert plan.main(["trainer.prompts_per_step=1", "rollout.num_generations=2", "trainer.updates_per_step=4"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "updates_have_sequences" in captured.err


def test_plan_imports_no_torch():
    code = "import sys; from grpo_cli import plan; plan.main(['+experiment=smoke']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
