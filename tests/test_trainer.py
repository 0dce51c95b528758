"""The policy in one process: passes, updates, refusals, clipping, what it says and what it leaves alone."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_cli.batch import Batch, pack, write_back
from grpo_cli.errors import GuardStop
from grpo_cli.loss import policy_loss
from grpo_cli.process import ranks
from grpo_cli.trainer.policy import Policy
from grpo_cli.types import Group
from tests import tiny

STAGES = [f"trainer.zero_stage={stage}" for stage in range(4)]
LORA = "model.lora={rank: 4, alpha: 8.0, dropout: 0.0, target_modules: [q_proj, down_proj]}"


@pytest.fixture(scope="module")
def alone():
    return ranks.start()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {f: tiny.tiny_model(tmp_path_factory.mktemp(f), f) for f in ("llama", "llama-tied", "gpt2")}


@pytest.fixture
def make(alone, models):
    def make(*overrides: str, family: str = "llama", total_steps: int | None = None) -> Policy:
        return Policy(tiny.config(f"model.path={models[family]}", *overrides), alone, total_steps)

    return make


def step(policy: Policy, groups: list[Group], number: int = 1) -> dict[str, float]:
    batch = pack(groups, policy.cfg, policy.ranks)
    return policy.add_logprobs(batch) | policy.update(batch, number)


def snapshot(policy: Policy) -> list[torch.Tensor]:
    """Copies of every weight, float32 weight and moment."""
    optimizer = policy.engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    masters = [p.detach().clone() for group in inner.param_groups for p in group["params"]]
    moments = [v.clone() for state in inner.state.values() for v in state.values() if torch.is_tensor(v)]
    return [tensor.clone() for _, tensor in policy.gathered_parameters()] + masters + moments


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def spoil(batch: Batch) -> Batch:
    """NaN in one advantage: loss and gradient of that update are NaN."""
    batch.updates[0][0].tokens.advantage_N[0] = math.nan
    return batch


class TestPasses:
    def test_one_update_a_step_needs_no_pass(self, make):
        metrics = step(make(), tiny.make_groups())
        assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
        assert not {"time/old_logprobs", "time/ref_logprobs", "kl"} & metrics.keys()

    def test_passes_that_run_are_timed_and_filled_in(self, make):
        policy = make("loss.kl_coef=0.1", "trainer.epochs_per_step=2", "rollout.temperature=0.5")  # D03: on both
        batch = pack(tiny.make_groups(), policy.cfg, policy.ranks)
        assert policy.add_logprobs(batch).keys() == {"time/old_logprobs", "time/ref_logprobs"}
        for micro in batch.micro_batches:
            torch.testing.assert_close(micro.tokens.ref_T, micro.tokens.old_T)
            assert micro.tokens.entropy_T is None

    def test_no_reference_is_loaded_unless_something_reads_it(self, make):
        assert make().reference is None
        assert make("loss.kl_coef=0.1").reference is not None

    def test_the_entropy_quantile_has_its_own_pass_when_the_old_one_is_skipped(self, make):
        policy = make("loss.top_entropy_quantile=0.2")
        batch = pack(tiny.make_groups(), policy.cfg, policy.ranks)
        assert policy.add_logprobs(batch).keys() == {"time/old_entropies"}
        assert all(m.tokens.old_T is None and m.tokens.entropy_T is not None for m in batch.micro_batches)
        assert policy.update(batch, 1)["updates/applied_count"] == 1

    def test_entropies_are_written_down_with_the_logprobs(self, make):
        """What `grpo replay` needs for loss.entropy_coef and loss.top_entropy_quantile: those of the first forward."""
        policy = make()
        groups = tiny.make_groups()
        batch = pack(groups, policy.cfg, policy.ranks)
        entropy = policy.update(batch, 1)["entropy"]
        write_back(batch, policy.ranks)
        written = [value for group in groups for c in group.completions for value in c.entropies or []]
        assert sum(written) / len(written) == pytest.approx(entropy, rel=1e-5)

    def test_an_update_that_did_not_happen_has_no_speed(self, make):
        assert step(make(), tiny.make_groups())["update/tokens_per_s"] > 0
        masked = step(make("loss.seq_logprob_error_threshold=1.0"), tiny.make_groups())
        assert masked["updates/empty_count"] == 1
        assert "update/tokens_per_s" not in masked
        assert "update/tokens_per_s" not in step(make(), [])

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    @pytest.mark.parametrize("tokens", [64, 4096])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_old_and_new_logprobs_agree_before_the_first_update(self, make, family, tokens, dtype):
        # B14; both models ask for a dropout of 0.1, and GPT-2 has absolute positions.
        overrides = ("trainer.updates_per_step=2", f"trainer.micro_batch_tokens={tokens}", f"model.dtype={dtype}")
        policy = make(*overrides, family=family)
        groups = tiny.make_groups()
        batch = pack(groups, policy.cfg, policy.ranks)
        policy.add_logprobs(batch)
        policy.update(batch, 1)
        write_back(batch, policy.ranks)
        first = {(s.group, s.completion) for micro in batch.updates[0] for s in micro.sequences}
        assert len(first) == 6
        for g, i in first:
            completion = groups[g].completions[i]
            assert completion.logprobs == pytest.approx(completion.old_logprobs, abs=1e-5)

    @pytest.mark.parametrize("several", ["trainer.updates_per_step=2", "trainer.epochs_per_step=2"])
    def test_the_ratio_leaves_one_from_the_second_update_on(self, make, several):
        # B15
        metrics = step(make(several, "trainer.lr=1e-2"), tiny.make_groups())
        assert metrics["ratio/max"] > 1.2
        assert metrics["clip_frac/high"] + metrics["clip_frac/low"] > 0

    def test_forcing_the_ratio_keeps_it_at_one(self, make):
        metrics = step(make("loss.force_on_policy_ratio=true"), tiny.make_groups())
        assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0


class TestNormalisation:
    @pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"])
    def test_micro_batches_and_packing_do_not_show(self, make, aggregation):
        # C02
        length = 16 if aggregation == "constant" else "null"
        found = []
        for packing, tokens in [("none", 40), ("sequence", 100), ("sequence", 4096), ("shared_prefix", 64)]:
            policy = make(
                f"loss.aggregation={aggregation}",
                f"loss.constant_length={length}",
                f"trainer.packing={packing}",
                f"trainer.micro_batch_tokens={tokens}",
            )
            metrics = step(policy, tiny.make_groups())
            found.append([metrics["loss"], metrics["grad_norm"]])
        for values in found[1:]:
            assert values == pytest.approx(found[0], rel=1e-5, abs=1e-6)

    @pytest.mark.parametrize(
        ("aggregation", "loss"),
        [("token_mean", 1.0), ("seq_mean_token_mean", 2.0), ("seq_mean_token_sum", 2.0), ("constant", 0.25)],
    )
    @pytest.mark.parametrize("tokens", [4, 64])
    def test_the_mean_is_global(self, make, aggregation, loss, tokens):
        # C01: one token of loss 4 (advantage -4 at ratio 1) and three of loss 0, in one micro-batch and in two.
        length = 8 if aggregation == "constant" else "null"
        policy = make(
            f"loss.aggregation={aggregation}",
            f"loss.constant_length={length}",
            f"trainer.micro_batch_tokens={tokens}",
            "trainer.packing=none",
        )
        (group,) = tiny.make_groups(count=1, generations=2)
        group.prompt.token_ids[:] = [3]
        for completion, ids, advantage in zip(group.completions, ([5], [6, 7, 8]), (-4.0, 0.0), strict=True):
            completion.token_ids, completion.advantage, completion.sampler_logprobs = ids, advantage, None
        assert step(policy, [group])["loss"] == pytest.approx(loss)

    def test_each_update_counts_its_own_tokens(self, make):
        # C03: four updates, every token's loss 1.
        policy = make("trainer.updates_per_step=4", "trainer.lr=1e-9", "trainer.micro_batch_tokens=40")
        groups = tiny.make_groups(count=4)
        for completion in (c for group in groups for c in group.completions):
            completion.advantage = -1.0
        assert step(policy, groups)["loss"] == pytest.approx(1.0, abs=1e-5)


class TestNothingToTrain:
    @pytest.mark.parametrize("stage", STAGES)
    def test_a_masked_step_changes_not_a_bit(self, make, stage):
        # C05, second case: the error threshold masks every sequence after the old pass has run.
        policy = make(stage, "loss.seq_logprob_error_threshold=2.0")
        groups = tiny.make_groups()
        for completion in (c for group in groups for c in group.completions):
            completion.sampler_logprobs = [-30.0] * len(completion.token_ids)
        before = snapshot(policy)
        metrics = step(policy, groups)
        assert (metrics["updates/applied_count"], metrics["updates/empty_count"]) == (0, 1)
        assert "loss" not in metrics
        assert "ratio/mean" not in metrics
        assert same(before, snapshot(policy))

    def test_no_group_at_all(self, make):
        # E06: nothing measured, and the rate goes on as if the step had trained.
        policy = make("trainer.warmup_steps=4")
        before = snapshot(policy)
        metrics = step(policy, [], 2)
        assert metrics["updates/empty_count"] == 1
        assert metrics["lr"] == pytest.approx(5e-3)
        assert not {"loss", "grad_norm", "loss/tokens_count"} & metrics.keys()
        assert same(before, snapshot(policy))

    def test_empty_completions_alone(self, make):
        # B04
        policy = make()
        groups = tiny.make_groups()
        for completion in (c for group in groups for c in group.completions):
            completion.token_ids, completion.sampler_logprobs = [], []
        before = snapshot(policy)
        metrics = step(policy, groups)
        assert (metrics["updates/applied_count"], metrics["updates/empty_count"]) == (0, 1)
        assert same(before, snapshot(policy))

    def test_a_masked_micro_batch_adds_exactly_nothing(self, make):
        # C05, first case.
        overrides = ("loss.seq_logprob_error_threshold=2.0", "trainer.micro_batch_tokens=40")
        groups = tiny.make_groups(sampler=False)
        policy = make(*overrides)
        batch = pack(groups, policy.cfg, policy.ranks)
        policy.add_logprobs(batch)
        write_back(batch, policy.ranks)
        for completion in (c for group in groups for c in group.completions):
            completion.sampler_logprobs = list(completion.old_logprobs)
        shorter = step(make(*overrides), groups[:-1])
        for completion in groups[-1].completions:
            completion.sampler_logprobs = [-30.0] * len(completion.token_ids)
        masked = step(make(*overrides), groups)
        assert masked["loss"] == pytest.approx(shorter["loss"], abs=1e-7)
        assert masked["grad_norm"] == pytest.approx(shorter["grad_norm"], rel=1e-6)


class TestRefusal:
    @pytest.mark.parametrize("stage", STAGES)
    def test_a_nan_changes_not_a_bit_and_the_next_step_trains(self, make, stage):
        policy = make(stage, "trainer.max_nonfinite_steps=2", "trainer.micro_batch_tokens=64")
        step(policy, tiny.make_groups(), 1)
        before = snapshot(policy)
        metrics = policy.update(spoil(pack(tiny.make_groups(), policy.cfg, policy.ranks)), 2)
        assert metrics["updates/nonfinite_count"] == 1
        assert math.isnan(metrics["loss"])
        assert math.isnan(metrics["grad_norm"])
        assert same(before, snapshot(policy))
        policy.raise_if_nonfinite(2)
        assert step(policy, tiny.make_groups(), 3)["updates/applied_count"] == 1
        assert policy.nonfinite_steps == 0
        assert not same(before, snapshot(policy))

    def test_a_loss_that_is_not_finite_is_refused_though_its_gradient_is(self, make, monkeypatch):
        def infinite(*args):
            loss, measures = policy_loss(*args)
            return loss + math.inf, measures

        monkeypatch.setattr("grpo_cli.trainer.policy.policy_loss", infinite)
        policy = make()
        before = snapshot(policy)
        assert step(policy, tiny.make_groups())["updates/nonfinite_count"] == 1
        assert same(before, snapshot(policy))

    def test_too_many_in_a_row_end_the_run(self, make):
        policy = make("trainer.max_nonfinite_steps=2")
        for number in (1, 2):
            policy.raise_if_nonfinite(number)
            policy.update(spoil(pack(tiny.make_groups(), policy.cfg, policy.ranks)), number)
        with pytest.raises(GuardStop, match=r"2 step\(s\) in a row, up to step 2"):
            policy.raise_if_nonfinite(2)

    def test_the_count_survives_a_restart(self, make):
        policy = make()
        policy.update(spoil(pack(tiny.make_groups(), policy.cfg, policy.ranks)), 1)
        policy.version = 7
        fresh = make()
        fresh.load_state(policy.state())
        assert (fresh.nonfinite_steps, fresh.version) == (1, 7)


class TestClipping:
    @pytest.fixture
    def descend(self, monkeypatch):
        """AdamW that applies bare gradients, so that the weights show what norm reached the optimizer."""

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad)

        monkeypatch.setattr(torch.optim.AdamW, "step", step)

    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("bound", [0.01, None])
    def test_what_reaches_the_optimizer(self, make, descend, stage, bound):
        # F08
        policy = make(stage, f"trainer.max_grad_norm={'null' if bound is None else bound}")
        before = {name: tensor.clone() for name, tensor in policy.gathered_parameters()}
        metrics = step(policy, tiny.make_groups())
        moved = sum((tensor - before[name]).double().square().sum() for name, tensor in policy.gathered_parameters())
        assert metrics["grad_norm"] > 1
        assert math.sqrt(moved) == pytest.approx(metrics["grad_norm"] if bound is None else bound, rel=1e-3)


class TestLearningRate:
    @pytest.mark.parametrize("updates", [1, 4])
    def test_the_logged_rate_follows_steps_not_micro_batches(self, make, updates):
        # C07: peak when two steps are done, down to the last update of step 10.
        logged = []
        for tokens in (4096, 40):
            policy = make(
                "trainer.warmup_steps=2",
                "trainer.lr_schedule=cosine",
                "trainer.steps=10",
                f"trainer.updates_per_step={updates}",
                f"trainer.micro_batch_tokens={tokens}",
            )
            logged.append([step(policy, tiny.make_groups(count=2), number)["lr"] for number in range(1, 11)])
        assert logged[0] == logged[1]
        assert logged[0][0] == pytest.approx(5e-3)
        assert logged[0][1] == pytest.approx(1e-2)
        last = (8 * updates - 1) / (8 * updates)
        assert logged[0][9] == pytest.approx(1e-2 * (1 + math.cos(math.pi * last)) / 2)

    def test_the_optimizer_gets_the_rate_of_its_update(self, make):
        policy = make("trainer.warmup_steps=4", "trainer.updates_per_step=2")
        step(policy, tiny.make_groups(), 2)
        assert policy.engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 4 / 8)


class TestWeights:
    @pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
    @pytest.mark.parametrize("stage", [STAGES[0], STAGES[3]])
    def test_names_and_values_are_those_of_transformers(self, make, family, stage):
        policy = make(stage, family=family)
        mine = {name: tensor.clone() for name, tensor in policy.gathered_parameters()}
        with policy.generation() as lm:
            theirs = {name: tensor.clone() for name, tensor in lm.named_parameters()}
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)

    def test_few_at_a_time(self, make, monkeypatch):
        from grpo_cli.model import weights

        monkeypatch.setattr(weights, "GATHER_ELEMENTS", 10_000)
        policy = make(STAGES[3])
        whole = 0
        for _, tensor in policy.gathered_parameters():
            present = sum(p.numel() for p in policy.module.parameters())
            assert tensor.numel() <= present <= 30_000
            whole += tensor.numel()
        assert whole == sum(p.ds_numel for p in policy.module.parameters())

    def test_generation_makes_evaluation_mode_and_keeps_the_cache(self, make):
        policy = make("model.gradient_checkpointing=true")
        step(policy, tiny.make_groups())
        with policy.generation() as lm:
            assert not lm.training
            assert lm(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values.get_seq_length() == 3


class TestAdapters:
    @pytest.fixture(autouse=True)
    def _peft(self):
        pytest.importorskip("peft")

    def test_only_adapters_train_and_the_reference_is_without_them(self, make):
        policy = make(LORA, "loss.kl_coef=0.1", "trainer.lr=1e-1")
        assert policy.reference is None
        assert step(policy, tiny.make_groups(), 1)["kl"] == pytest.approx(0, abs=1e-6)
        assert step(policy, tiny.make_groups(), 2)["kl"] > 1e-3

    @pytest.mark.parametrize("stage", [STAGES[0], STAGES[3]])
    def test_weights_come_merged_under_the_models_own_names(self, make, stage):
        plain, policy = make(), make(LORA, stage, "trainer.lr=1e-1")
        step(policy, tiny.make_groups())
        base = {name: tensor.clone() for name, tensor in plain.gathered_parameters()}
        merged = {name: tensor.clone() for name, tensor in policy.gathered_parameters()}
        assert merged.keys() == base.keys()
        changed = {name for name in base if not torch.equal(base[name], merged[name])}
        assert changed == {name for name in base if "q_proj" in name or "down_proj" in name}
        # The merged weights, in a plain model, score as the adapted one does.
        plain.module.load_state_dict(merged)
        assert plain.score([1, 2, 3], [4, 5]) == pytest.approx(policy.score([1, 2, 3], [4, 5]), abs=1e-4)


@pytest.mark.parametrize("overrides", ["trainer.zero_stage=1 model.dtype=bfloat16", "trainer.zero_stage=3"])
def test_nothing_of_deepspeed_reaches_the_console(models, overrides):
    script = (
        "import sys; from grpo_cli.process import ranks; from grpo_cli.trainer.policy import Policy\n"
        "from tests import tiny\n"
        "from tests.test_trainer import step\n"
        "policy = Policy(tiny.config(*sys.argv[1:]), ranks.start())\n"
        "step(policy, tiny.make_groups()); list(policy.gathered_parameters()); ranks.leave(0)"
    )
    command = [sys.executable, "-c", script, f"model.path={models['llama']}", *overrides.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    @pytest.mark.parametrize("packing", ["none", "sequence", "shared_prefix"])
    def test_every_packing_gives_one_answer(self, make, packing):
        base = step(make("trainer.packing=none"), tiny.make_groups())
        metrics = step(make(f"trainer.packing={packing}"), tiny.make_groups())
        assert metrics["loss"] == pytest.approx(base["loss"], abs=1e-4)
        assert metrics["grad_norm"] == pytest.approx(base["grad_norm"], rel=1e-3)

    @pytest.mark.parametrize("stage", STAGES)
    def test_bfloat16_trains_on_every_stage(self, make, stage):
        policy = make(stage, "model.dtype=bfloat16", "model.gradient_checkpointing=true")
        assert step(policy, tiny.make_groups())["updates/applied_count"] == 1
        assert policy.device.type == "cuda"

    def test_flash_attention_keeps_packed_neighbours_apart(self, make):
        pytest.importorskip("flash_attn")
        overrides = ("model.dtype=bfloat16", "trainer.packing=sequence")
        flash = make("model.attn_implementation=flash_attention_2", *overrides)
        assert flash.score([1, 2, 3], [4, 5]) == pytest.approx(make(*overrides).score([1, 2, 3], [4, 5]), abs=0.1)
