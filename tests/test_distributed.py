"""The same batch gives the same loss, gradient and weights whatever processes, ZeRO stage, packing or micro-batches."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from grpo_cli.process import ranks
from grpo_cli.schema import Config
from grpo_cli.trainer.policy import Policy
from grpo_cli.types import Completion, Group
from tests import distributed_worker as worker
from tests import tiny

STAGES = [f"trainer.zero_stage={stage} trainer.micro_batch_tokens=64" for stage in range(4)]
LAYOUTS = [
    f"trainer.packing={packing} trainer.micro_batch_tokens={tokens}"
    for packing in ("none", "sequence", "shared_prefix")
    for tokens in (40, 96, 4096)
]
BFLOAT16 = [f"model.dtype=bfloat16 {stage}" for stage in STAGES]
KL = [f"loss.kl_coef=0.1 trainer.zero_stage={stage}" for stage in (0, 3)]
CHECKPOINTING = [f"model.gradient_checkpointing=true trainer.zero_stage={stage}" for stage in (2, 3)]
OFFLOAD = [
    f"{stage} trainer.offload_optimizer=true trainer.offload_param={'true' if number == 3 else 'false'}"
    for number, stage in enumerate(STAGES)
    if number
]


TOGETHER = [*STAGES, *LAYOUTS[::3], *BFLOAT16, *KL, *CHECKPOINTING, *OFFLOAD]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.tiny_model(tmp_path_factory.mktemp("llama"), "llama-tied")


def launch(model: Path, out: Path, scenarios: list[str], world: int = 2) -> dict:
    """Results of `scenarios` in `world` processes, or the failing process's output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
        }
        command = [sys.executable, "-m", "tests.distributed_worker", str(model), str(out), *scenarios]
        log = (out.parent / f"rank{rank}.log").open("w")
        processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join((out.parent / f"rank{rank}.log").read_text() for rank in range(world))
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def one_process(llama):
    alone = ranks.start()
    return {
        scenario: worker.run(Policy(tiny.config(f"model.path={llama}", *worker.overrides(scenario)), alone))
        for scenario in [*STAGES, *LAYOUTS, KL[0]]
    }


@pytest.fixture(scope="module")
def two_processes(llama, tmp_path_factory):
    return launch(llama, tmp_path_factory.mktemp("two") / "out.json", TOGETHER)


def assert_same(got: dict, expected: dict, rel: float = 1e-5) -> None:
    """Loss (terms of size 1 that cancel) and gradient norm to 1e-5; what Adam amplifies (small moments) to 2e-4."""
    for mine, theirs in zip(got["rows"], expected["rows"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("loss", "grad_norm", "loss/tokens_count", "lr"):
            assert mine[key] == pytest.approx(theirs[key], rel=rel, abs=rel / 5), key
        assert mine == {key: pytest.approx(value, rel=20 * rel, abs=2 * rel) for key, value in theirs.items()}
    assert got["weights"] == {name: pytest.approx(value, rel=rel) for name, value in expected["weights"].items()}


def plain_torch(model: Path, cfg: Config) -> dict:
    """The same steps in plain torch: each sequence alone, float32, clipped surrogate, token mean, torch's AdamW."""
    lm = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    adam = torch.optim.AdamW(lm.parameters(), lr=cfg.trainer.lr, weight_decay=cfg.trainer.weight_decay)

    def logprobs(group: Group, completion: Completion) -> torch.Tensor:
        prompt, ids = group.prompt.token_ids, completion.token_ids
        logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / cfg.rollout.temperature
        return logits.log_softmax(-1)[torch.arange(len(ids)), ids]

    rows = []
    for groups in worker.steps():
        sequences = [(g, c) for g in groups for c in g.completions if c.finish_reason == "stop"]
        with torch.no_grad():
            old = [logprobs(*sequence) for sequence in sequences]
        half = len(sequences) // 2
        losses, norms = [], []
        for part in (slice(0, half), slice(half, None)):
            tokens = sum(len(completion.token_ids) for _, completion in sequences[part])
            if not tokens:
                continue
            loss = torch.zeros(())
            for (group, completion), old_T in zip(sequences[part], old[part], strict=True):
                ratio_T = (logprobs(group, completion) - old_T).exp()
                a = completion.advantage
                loss = loss - torch.minimum(ratio_T * a, ratio_T.clamp(0.8, 1.2) * a).sum() / tokens
            adam.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(lm.parameters(), 1e9).item())
            adam.step()
            losses.append(loss.item())
        rows.append({"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)})
    return {"rows": rows, "weights": {name: weight.norm().item() for name, weight in lm.named_parameters()}}


def test_one_process_agrees_with_plain_torch(one_process, llama):
    got = one_process[STAGES[0]]
    expected = plain_torch(llama, tiny.config(f"model.path={llama}", *worker.overrides(STAGES[0])))
    for mine, theirs in zip(got["rows"], expected["rows"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
    assert got["weights"] == {name: pytest.approx(value, rel=1e-5) for name, value in expected["weights"].items()}


@pytest.mark.parametrize("scenario", [*STAGES[1:], *LAYOUTS])
def test_one_process_gives_one_answer(one_process, scenario):
    assert_same(one_process[scenario], one_process[STAGES[0]])


@pytest.mark.parametrize("scenario", [*STAGES, *LAYOUTS[::3], *CHECKPOINTING, *OFFLOAD])
def test_two_processes_agree_with_one(one_process, two_processes, scenario):
    assert_same(two_processes[scenario], one_process[STAGES[0]])


@pytest.mark.parametrize("scenario", KL)
def test_the_reference_is_the_start_policy_on_every_stage(one_process, two_processes, scenario):
    assert_same(two_processes[scenario], one_process[KL[0]])
    assert two_processes[scenario]["rows"][0]["kl"] < two_processes[scenario]["rows"][1]["kl"]


@pytest.mark.parametrize("scenario", BFLOAT16[1:])
def test_stages_agree_in_bfloat16(two_processes, scenario):
    """The same kernels on the same layout; what remains is the order of sums over ranks, once rounded to bfloat16."""
    assert_same(two_processes[scenario], two_processes[BFLOAT16[0]], rel=1e-3)


@pytest.mark.parametrize("scenario", [*STAGES, *OFFLOAD])
def test_all_ranks_refuse_what_is_not_finite_on_one(two_processes, scenario):
    assert two_processes[scenario]["refused"] == [1, 1]
    assert two_processes[scenario]["unmoved"] == [True, True]


@pytest.mark.parametrize("scenario", STAGES)
def test_generation_sees_whole_weights(two_processes, scenario):
    result = two_processes[scenario]
    assert result["generation"] == pytest.approx(result["score"], abs=1e-5)


def test_all_ranks_run_as_many_passes(two_processes):
    for result in two_processes.values():
        for first, second in result["passes"]:
            assert first == second
    # The third step has one trained completion: one pass of one update, a dummy on the other rank.
    assert two_processes[STAGES[3]]["passes"][2] == [[0, 1], [0, 1]]
