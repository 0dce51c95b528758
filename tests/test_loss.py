"""The loss: layouts, masks, whitening, entropy selection, gradients in closed form, and what is measured."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from configs import make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.loss import SURROGATES, Measures, Tokens, policy_loss, prepare
from grpo_cli.loss.objective import KL_ESTIMATORS, correction_weights

SEVERAL = ("trainer.epochs_per_step=2",)


def identity(tensor):
    return tensor


def numbers(values):
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def make_tokens(lengths, advantages, trained=None, **lists):
    """Sequences of these lengths and advantages; `lists` are flat lists for sampler_T, old_T, ref_T, entropy_T."""
    return Tokens(
        seq_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        length_N=torch.tensor(lengths, dtype=torch.int64),
        trained_N=torch.tensor([True] * len(lengths) if trained is None else trained, dtype=torch.bool),
        advantage_N=numbers(advantages),
        **{name: numbers(values) for name, values in lists.items()},
    )


def loss_and_grad(tokens, logprobs, cfg, entropy=None):
    """Loss, gradient and measures of one micro-batch that is the whole update."""
    prepare([[tokens]], cfg, identity)
    leaf = numbers(logprobs).requires_grad_()
    loss, measures = policy_loss(leaf, numbers(entropy), tokens, cfg)
    (grad,) = torch.autograd.grad(loss, [leaf])
    return loss.item(), grad.tolist(), measures.result()


class Crowd:
    """Ranks as threads: `reduce` sums over all of them, and `run` calls one function on each."""

    def __init__(self, world):
        self.world, self.parts = world, [None] * world
        self.barrier = threading.Barrier(world)
        self.local = threading.local()

    def reduce(self, tensor):
        self.parts[self.local.rank] = tensor
        self.barrier.wait(timeout=10)
        total = torch.stack(self.parts).sum(0)
        self.barrier.wait(timeout=10)
        return total

    def run(self, work, *shares):
        def on_rank(rank):
            self.local.rank = rank
            return work(shares[rank])

        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(on_rank, range(self.world)))


# --- C01, C03, C05, B04: shares of the update ------------------------------------------------------------------------


C01 = {"token_mean": 1.0, "seq_mean_token_mean": 2.0, "seq_mean_token_sum": 2.0, "constant": 0.25}


def c01_config(aggregation):
    length = 8 if aggregation == "constant" else "null"
    return make_config("loss=reinforce", f"loss.aggregation={aggregation}", f"loss.constant_length={length}")


@pytest.mark.parametrize("aggregation", C01)
def test_loss_does_not_depend_on_the_layout(aggregation):
    """Case C01: one sequence of 1 token (loss 4), one of 3 tokens (loss 0)."""
    cfg = c01_config(aggregation)
    one = ([1], [1.0], [-4.0])
    three = ([3], [1.0], [0.0, 0.0, 0.0])
    both = ([1, 3], [1.0, 1.0], [-4.0, 0.0, 0.0, 0.0])
    empty = ([], [], [])

    def share(reduce, micro_batches):
        update = [(make_tokens(lengths, values), logprobs) for lengths, values, logprobs in micro_batches]
        prepare([[tokens for tokens, _ in update]], cfg, reduce)
        return sum(policy_loss(numbers(logprobs), None, tokens, cfg)[0].item() for tokens, logprobs in update)

    for layout in ([both], [one, three], [three, empty, one]):
        assert share(identity, layout) == pytest.approx(C01[aggregation])
    for layouts in ([[one], [three]], [[both], []], [[empty], [three, one]]):
        crowd = Crowd(2)
        got = crowd.run(lambda layout, crowd=crowd: share(crowd.reduce, layout), *layouts)
        assert sum(got) == pytest.approx(C01[aggregation])


def test_counts_are_those_of_one_update():
    """Case C03: eight micro-batches in four updates, every token's loss 1: each update's loss is 1."""
    cfg = make_config("loss=reinforce")
    updates = [[make_tokens([size], [1.0]), make_tokens([1], [1.0])] for size in (1, 2, 3, 7)]
    metrics = prepare(updates, cfg, identity)
    for update in updates:
        logprobs = [torch.full((len(tokens.seq_T),), -1.0, dtype=torch.float64) for tokens in update]
        losses = [policy_loss(lp, None, tokens, cfg)[0].item() for lp, tokens in zip(logprobs, update, strict=True)]
        assert sum(losses) == pytest.approx(1.0)
    assert [update[0].update_tokens for update in updates] == [2, 3, 4, 8]
    assert metrics == {"loss/tokens_count": 17.0}


@pytest.mark.parametrize("aggregation", C01)
def test_masked_micro_batches_add_exactly_nothing(aggregation):
    """Case C05: a fully masked micro-batch among good ones, then nothing but masked ones."""
    cfg = c01_config(aggregation)
    good, masked = make_tokens([2], [1.0]), make_tokens([3], [5.0], trained=[False])
    prepare([[good, masked]], cfg, identity)
    leaf = numbers([-1.0, -2.0, -3.0]).requires_grad_()
    loss, measures = policy_loss(leaf, None, masked, cfg)
    (grad,) = torch.autograd.grad(loss, [leaf])
    assert (loss.item(), grad.tolist(), measures.result()) == (0.0, [0.0] * 3, {})

    loss, grad, _ = loss_and_grad(make_tokens([2, 0], [1.0, 1.0], trained=[False, True]), [-1.0, -2.0], cfg)
    assert (loss, grad) == (0.0, [0.0, 0.0])
    tokens = make_tokens([2], [1.0], trained=[False])
    prepare([[tokens]], cfg, identity)
    assert tokens.update_tokens == 0


def test_empty_completions_are_in_no_count():
    """Case B04: an empty completion adds no token and is not in N."""
    cfg = make_config("loss=reinforce", "loss.aggregation=seq_mean_token_sum")
    loss, grad, _ = loss_and_grad(make_tokens([0, 2, 0, 1], [1.0] * 4), [-1.0, -2.0, -3.0], cfg)
    assert loss == pytest.approx(6.0 / 2)
    assert grad == pytest.approx([-0.5] * 3)
    loss, grad, metrics = loss_and_grad(make_tokens([0, 0], [1.0, -1.0]), [], cfg)
    assert (loss, grad, metrics) == (0.0, [], {})


@pytest.mark.parametrize("name", SURROGATES)
def test_masked_tokens_may_hold_anything(name):
    """A gap whose exp overflows in a masked sequence must not reach loss, gradient or metrics as inf or NaN."""
    cfg = make_config(
        f"loss={name}", "loss.kl_coef=0.1", "loss.correction.mode=mask", "loss.correction.level=sequence", *SEVERAL
    )
    wild = [1e6, -math.inf, math.nan]
    lists = {name: [-1.0, *wild] for name in ("old_T", "ref_T", "sampler_T")}
    tokens = make_tokens([1, 3], [1.0, -1.0], trained=[True, False], **lists)
    loss, grad, metrics = loss_and_grad(tokens, [-1.5, -1.0, -1.0, math.nan], cfg)
    assert math.isfinite(loss)
    assert math.isfinite(grad[0])
    assert grad[1:] == [0.0] * 3
    assert all(map(math.isfinite, metrics.values()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_gives_the_same_loss_and_gradient(data):
    """Case C02: the same sequences in one micro-batch and in any other split, whatever the loss."""
    name = data.draw(st.sampled_from(["ppo_clip", "gspo", "cispo", "gmpo", "sapo"]))
    overrides = [f"loss={name}", "loss.kl_coef=0.1", *SEVERAL]
    if name in ("ppo_clip", "cispo", "sapo"):
        overrides += [f"loss.aggregation={data.draw(st.sampled_from(['token_mean', 'seq_mean_token_mean']))}"]
        overrides += [f"loss.top_entropy_quantile={data.draw(st.sampled_from([0.3, 1.0]))}"]
    overrides += data.draw(
        st.sampled_from(
            [
                [],
                ["loss.correction.mode=truncate", "loss.correction.level=sequence", "loss.correction.high=2.0"],
                ["loss.seq_logprob_error_threshold=1.4"],
                ["advantage=reinforce_pp", "filter=none"],
            ]
        )
    )
    cfg = make_config(*overrides)
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    trained = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {0, len(lengths)})
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    lists = {
        key: -torch.rand(sum(lengths), generator=noise, dtype=torch.float64) for key in ("lp", "old", "ref", "smp")
    }
    entropy = torch.rand(sum(lengths), generator=noise, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=noise, dtype=torch.float64).tolist()

    def run(bounds):
        update, leaves = [], []
        for start, stop in pairwise(bounds):
            a, b = sum(lengths[:start]), sum(lengths[:stop])
            old, ref, smp = (lists[key][a:b].tolist() for key in ("old", "ref", "smp"))
            part = make_tokens(lengths[start:stop], advantages[start:stop], trained[start:stop], old_T=old, ref_T=ref)
            part.sampler_T, part.entropy_T = numbers(smp), entropy[a:b]
            update.append(part)
            leaves.append(lists["lp"][a:b].clone().requires_grad_())
        prepare([update], cfg, identity)
        losses = [policy_loss(leaf, None, part, cfg)[0] for leaf, part in zip(leaves, update, strict=True)]
        return sum(losses).item(), torch.cat(torch.autograd.grad(sum(losses), leaves)).tolist()

    whole, grad = run([0, len(lengths)])
    split, split_grad = run(cuts)
    assert split == pytest.approx(whole, rel=1e-10, abs=1e-12)
    assert split_grad == pytest.approx(grad, rel=1e-10, abs=1e-12)


# --- gradients in closed form ----------------------------------------------------------------------------------------

LP = [-1.0, -0.5, -2.0, -1.2, -0.7]
OLD = [-1.4, -0.4, -1.9, -1.3, -0.2]
REF = [-1.1, -0.9, -1.5, -1.2, -0.9]
A = 1.5, -2.0  # sequences of 3 and 2 tokens
W = 1 / 5  # token_mean


def surrogate_config(name, *overrides):
    return make_config(f"loss={name}", "loss.aggregation=token_mean", *overrides, *SEVERAL)


def two_sequences(**lists):
    return make_tokens([3, 2], list(A), old_T=OLD, **lists)


RATIOS = [math.exp(lp - old) for lp, old in zip(LP, OLD, strict=True)]  # 1.4918 0.9048 0.9048 | 1.1052 0.6065


def test_ppo_clip_gradient():
    """-A r where the clip lets it through: 1.49 > 1.2 with A > 0 and 0.61 < 0.8 with A < 0 do not."""
    _, grad, metrics = loss_and_grad(two_sequences(), LP, surrogate_config("ppo_clip"))
    want = [0.0, -A[0] * RATIOS[1], -A[0] * RATIOS[2], -A[1] * RATIOS[3], 0.0]
    assert grad == pytest.approx([W * value for value in want])
    assert (metrics["clip_frac/high"], metrics["clip_frac/low"]) == (0.2, 0.2)
    assert metrics["ratio/max"] == pytest.approx(RATIOS[0])
    assert metrics["ratio/min"] == pytest.approx(RATIOS[4])
    assert metrics["ratio/mean"] == pytest.approx(sum(RATIOS) / 5)


def test_clip_fractions_know_the_sign():
    """The same ratios with the signs turned: outside the range, but the pessimistic side, so nothing is clipped."""
    tokens = make_tokens([3, 2], [-A[0], -A[1]], old_T=OLD)
    _, grad, metrics = loss_and_grad(tokens, LP, surrogate_config("ppo_clip"))
    assert (metrics["clip_frac/high"], metrics["clip_frac/low"]) == (0.0, 0.0)
    assert all(grad)


def test_dual_clip_gradient():
    """A < 0 and r > c: the loss is -cA, a constant; for A > 0 the second bound is none."""
    tokens = make_tokens([2, 1], [-1.0, 1.0], old_T=[-3.0, -1.0, -3.0])
    loss, grad, metrics = loss_and_grad(tokens, [-1.0, -1.0, -1.0], surrogate_config("ppo_clip", "loss.dual_clip=2.0"))
    assert loss == pytest.approx((2.0 + 1.0 - 1.2) / 3)
    assert grad == pytest.approx([0.0, 1 / 3, 0.0])
    assert metrics["clip_frac/dual"] == pytest.approx(1 / 3)
    assert metrics["clip_frac/high"] == pytest.approx(1 / 3)


def test_gspo_gradient_flows_through_the_mean():
    """-A s / L for every token of a sequence inside the range."""
    cfg = surrogate_config("gspo", "loss.aggregation=seq_mean_token_mean", "loss.clip_low=0.5", "loss.clip_high=0.5")
    _, grad, metrics = loss_and_grad(two_sequences(), LP, cfg)
    s = [math.exp(sum(LP[a:b]) / (b - a) - sum(OLD[a:b]) / (b - a)) for a, b in ((0, 3), (3, 5))]
    # the token values of a sequence are equal, so their mean has the gradient of one: -A s d(mean)/d lp_t
    want = [-A[0] * s[0] / 3 / 2] * 3 + [-A[1] * s[1] / 2 / 2] * 2
    assert grad == pytest.approx(want)
    assert metrics["ratio/max"] == pytest.approx(max(s))


def test_cispo_gradient_keeps_clipped_tokens():
    """-A min(r, 1 + clip_high): the first token is clipped and still has a gradient."""
    _, grad, metrics = loss_and_grad(two_sequences(), LP, surrogate_config("cispo", "loss.clip_high=0.2"))
    want = [-A[0] * 1.2, -A[0] * RATIOS[1], -A[0] * RATIOS[2], -A[1] * RATIOS[3], -A[1] * RATIOS[4]]
    assert grad == pytest.approx([W * value for value in want])
    assert (metrics["clip_frac/high"], metrics["clip_frac/low"]) == (0.2, 0.0)


def test_gmpo_gradient():
    """-A exp(mean) / L where the log ratio is not clamped; 0.4 > 0.2 with A > 0 and -0.5 < -0.3 with A < 0 are."""
    cfg = surrogate_config("gmpo", "loss.aggregation=seq_mean_token_mean", "loss.clip_low=0.3", "loss.clip_high=0.2")
    loss, grad, metrics = loss_and_grad(two_sequences(), LP, cfg)
    first, second = math.exp((0.2 - 0.1 - 0.1) / 3), math.exp((0.1 - 0.3) / 2)
    assert loss == pytest.approx((-A[0] * first - A[1] * second) / 2)
    want = [0.0, -A[0] * first / 6, -A[0] * first / 6, -A[1] * second / 4, 0.0]
    assert grad == pytest.approx(want)
    assert (metrics["clip_frac/high"], metrics["clip_frac/low"]) == (0.2, 0.2)


def test_sapo_gradient():
    """-4 A r s(1 - s), s = sigmoid(tau (r - 1)): at r = 1 the gradient of the plain ratio."""
    _, grad, metrics = loss_and_grad(two_sequences(), LP, surrogate_config("sapo"))
    want = []
    for ratio, advantage, tau in zip(RATIOS, [A[0]] * 3 + [A[1]] * 2, [1.0] * 3 + [1.05] * 2, strict=True):
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        want.append(-4 * advantage * ratio * gate * (1 - gate) * W)
    assert grad == pytest.approx(want)
    assert not [key for key in metrics if key.startswith("clip_frac")]


def test_sapo_in_float64_takes_tau_as_it_is_given():
    """At r = 1 the gate is 1/2 and the value -2 A / tau; a tau of float32 would be off by 5e-8."""
    loss, _, _ = loss_and_grad(make_tokens([1], [-1.0], old_T=[-1.0]), [-1.0], surrogate_config("sapo"))
    assert loss == pytest.approx(2 / 1.05, rel=1e-15)


def test_reinforce_gradient():
    loss, grad, metrics = loss_and_grad(make_tokens([3, 2], list(A)), LP, make_config("loss=reinforce"))
    assert grad == pytest.approx([-A[0] * W] * 3 + [-A[1] * W] * 2)
    assert loss == pytest.approx(W * (1.5 * 3.5 - 2.0 * 1.9))
    assert metrics == {}


KL_GRADIENTS = {
    "k1": lambda d: 1.0,
    "k2": lambda d: -d,
    "k3": lambda d: 1 - math.exp(d),
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_gradient(name):
    """d = ref - lp, so d/dlp = -d/dd: of -d, d^2/2 and e^d - 1 - d."""
    cfg = make_config("loss=ppo_clip", "loss.kl_coef=0.1", f"loss.kl_estimator={name}")
    tokens = make_tokens([3, 2], [0.0, 0.0], ref_T=REF)
    _, grad, metrics = loss_and_grad(tokens, LP, cfg)
    gaps = [ref - lp for ref, lp in zip(REF, LP, strict=True)]
    assert grad == pytest.approx([0.1 * W * KL_GRADIENTS[name](gap) for gap in gaps])
    value = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[name]
    assert metrics["kl"] == pytest.approx(sum(map(value, gaps)) / 5)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("name", sorted(set(SURROGATES) - {"cispo"}))  # cispo's weight is held constant on purpose
def test_gradients_agree_with_differences(name, aggregation):
    """Autograd against central differences, away from the kinks."""
    cfg = make_config(f"loss={name}", f"loss.aggregation={aggregation}", "loss.kl_coef=0.05", *SEVERAL)
    if name == "dr_grpo":
        cfg = make_config("loss=dr_grpo", "loss.kl_coef=0.05", *SEVERAL)
    tokens = make_tokens([3, 2], list(A), old_T=[-1.45, -0.4, -1.9, -1.3, -0.2], ref_T=REF)
    prepare([[tokens]], cfg, identity)
    leaf = numbers(LP).requires_grad_()
    assert torch.autograd.gradcheck(lambda lp: policy_loss(lp, None, tokens, cfg)[0], (leaf,), eps=1e-6, atol=1e-8)


# --- ratio one, corrections ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "gmpo", "sapo"])
def test_a_skipped_old_pass_is_ratio_one_with_the_gradient_of_the_logprobs(name):
    cfg = make_config(f"loss={name}")
    _, grad, metrics = loss_and_grad(make_tokens([3, 2], list(A)), LP, cfg)
    share = [1 / 5] * 5 if name in ("ppo_clip", "cispo") else [1 / 6] * 3 + [1 / 4] * 2
    assert grad == pytest.approx([-a * w for a, w in zip([A[0]] * 3 + [A[1]] * 2, share, strict=True)])
    assert metrics["ratio/mean"] == metrics["ratio/min"] == metrics["ratio/max"] == 1.0


def test_force_on_policy_ratio_ignores_the_old_logprobs():
    cfg = make_config("loss.force_on_policy_ratio=true", "loss.clip_low=null", "loss.clip_high=null")
    loss, grad, metrics = loss_and_grad(two_sequences(), LP, cfg)
    assert loss == pytest.approx(-W * (3 * A[0] + 2 * A[1]))
    assert grad == pytest.approx([-A[0] * W] * 3 + [-A[1] * W] * 2)
    assert metrics["ratio/max"] == 1.0


def correct(level, mode="truncate", low="null", high="null"):
    cfg = make_config(
        f"loss.correction.mode={mode}",
        f"loss.correction.level={level}",
        f"loss.correction.low={low}",
        f"loss.correction.high={high}",
    )
    tokens = make_tokens([2, 1], [1.0, 1.0], sampler_T=[-1.0, -1.0, -1.0])
    old = numbers([-1.0 + math.log(2.0), -1.0 + math.log(4.0), -1.0 - math.log(2.0)])
    weights = correction_weights(old, tokens, cfg.loss.correction)
    return weights.raw_T.tolist(), weights.used_T.tolist()


def test_correction_levels():
    """Token weights 2, 4 | 1/2: their product 8 and geometric mean sqrt(8) in the first sequence."""
    assert correct("token")[0] == pytest.approx([2.0, 4.0, 0.5])
    assert correct("sequence")[0] == pytest.approx([8.0, 8.0, 0.5])
    assert correct("geometric")[0] == pytest.approx([math.sqrt(8.0)] * 2 + [0.5])


def test_correction_modes():
    assert correct("token", "truncate", 0.9, 3.0)[1] == pytest.approx([2.0, 3.0, 0.9])
    assert correct("token", "truncate", "null", 3.0)[1] == pytest.approx([2.0, 3.0, 0.5])
    assert correct("token", "mask", 0.9, 3.0)[1] == pytest.approx([2.0, 0.0, 0.0])
    assert correct("token", "mask", "null", 3.0)[1] == pytest.approx([2.0, 0.0, 0.5])


def test_an_overflowing_weight_is_truncated_or_masked_to_a_number():
    for mode, want in (("truncate", 5.0), ("mask", 0.0)):
        cfg = make_config(f"loss.correction.mode={mode}", "loss.correction.level=sequence", "loss.correction.high=5.0")
        tokens = make_tokens([2], [1.0], sampler_T=[-900.0, -1.0])
        loss, grad, metrics = loss_and_grad(tokens, [-1.0, -1.0], cfg)
        assert loss == pytest.approx(-want)
        assert grad == pytest.approx([-want / 2] * 2)
        assert metrics["correction/high_frac"] == 1.0


def test_the_weight_of_a_long_sequence_is_measured_beyond_float32():
    """1,000 tokens, each 0.1 nats apart: exp(100) is no float32, and is the raw weight all the same."""
    cfg = make_config("loss.correction.mode=truncate", "loss.correction.level=sequence", "loss.correction.high=2.0")
    tokens = make_tokens([1000], [1.0], sampler_T=[-1.1] * 1000)
    for name in ("advantage_N", "sampler_T"):
        setattr(tokens, name, getattr(tokens, name).float())
    prepare([[tokens]], cfg, identity)
    loss, measures = policy_loss(torch.full((1000,), -1.0), None, tokens, cfg)
    assert measures.result()["correction/weight_max"] == pytest.approx(math.exp(100), rel=1e-3)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-2.0)


@pytest.mark.parametrize(
    ("overrides", "advantage", "want"),
    [
        ("loss=ppo_clip", 1.0, (-1.2 - 1.0) / 2),  # clipped at 1 + clip_high; the other token's ratio is 1
        ("loss=ppo_clip", 0.0, 0.0),
        ("loss=ppo_clip loss.dual_clip=3.0", -1.0, (3.0 + 1.0) / 2),
        ("loss=gmpo", 0.0, 0.0),
        ("loss=sapo", 1.0, -(4.0 + 2.0) / 2),  # 4 sigmoid(inf), 4 sigmoid(0)
        ("loss=ppo_clip loss.correction.mode=mask loss.correction.low=0.5 loss.correction.high=2.0", -1.0, 0.5),
    ],
)
def test_a_ratio_beyond_float32_is_clipped_like_any_other(overrides, advantage, want):
    """A move of 94.9 nats on one token: exp of it is no float32. In the last case its weight is 0."""
    cfg = make_config(*overrides.split(), *SEVERAL)
    level = "sequence" if cfg.loss.name == "gmpo" else "token"
    sampler = [-0.1, -1.0] if level == "token" else None
    tokens = make_tokens([2], [advantage], old_T=[-95.0, -1.0], sampler_T=sampler)
    for name in ("advantage_N", "old_T", "sampler_T"):
        values = getattr(tokens, name)
        setattr(tokens, name, None if values is None else values.float())
    prepare([[tokens]], cfg, identity)
    leaf = torch.tensor([-0.1, -1.0], requires_grad=True)
    loss, measures = policy_loss(leaf, None, tokens, cfg)
    (grad,) = torch.autograd.grad(loss, [leaf])
    assert loss.item() == pytest.approx(want)
    assert grad[0] == 0
    assert grad.isfinite().all()
    assert math.isfinite(measures.result()["ratio/max"])


def test_correction_metrics_are_raw_and_a_masked_token_is_not_clipped():
    cfg = make_config("loss.correction.mode=mask", "loss.correction.low=0.9", "loss.correction.high=1.2", *SEVERAL)
    tokens = make_tokens([2], [1.0], old_T=[-1.0, -1.0], sampler_T=[-1.0 - math.log(3), -1.0])
    _, grad, metrics = loss_and_grad(tokens, [0.0, 0.0], cfg)
    assert metrics["correction/weight_max"] == pytest.approx(3.0)
    assert metrics["correction/weight_mean"] == pytest.approx(2.0)
    assert (metrics["correction/low_frac"], metrics["correction/high_frac"]) == (0.0, 0.5)
    # both ratios are e > 1.2, but the first token has no gradient that the clip could have changed
    assert metrics["clip_frac/high"] == 0.5
    assert grad == [0.0, 0.0]
    assert metrics["sampling/logprob_gap_max"] == pytest.approx(math.log(3))
    assert metrics["sampling/logprob_gap_mean"] == pytest.approx(math.log(3) / 2)


# --- prepare: threshold, whitening, KL in the reward, entropies -------------------------------------------------------


def test_the_error_threshold_masks_whole_sequences():
    cfg = make_config("loss.seq_logprob_error_threshold=1.2", "loss=reinforce")
    tokens = make_tokens([2, 2, 0], [1.0, 1.0, 1.0], old_T=[-1.0] * 4, sampler_T=[-1.0, -1.5, -1.0, -1.1])
    metrics = prepare([[tokens]], cfg, identity)
    assert tokens.trained_N.tolist() == [False, True, True]
    assert tokens.weight_T.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert metrics["sampling/sequence_masked_frac"] == 0.5
    first, second = (1 + math.exp(0.5)) / 2, (1 + math.exp(0.1)) / 2
    assert metrics["sampling/sequence_error_mean"] == pytest.approx((first + second) / 2)


def test_whitening_weighs_by_tokens():
    """Values 1 x 1 and 0 x 3: mean 1/4, variance 3/16: (3/4) / (sqrt(3)/4) = sqrt(3)."""
    cfg = make_config("advantage=reinforce_pp", "filter=none")
    tokens = make_tokens([1, 3, 2], [1.0, 0.0, 9.0], trained=[True, True, False])
    prepare([[tokens]], cfg, identity)
    assert tokens.advantage_T.tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3 + [0.0, 0.0])


def test_whitening_is_over_all_updates_and_ranks_and_the_clamp_is_last():
    cfg = make_config("advantage=reinforce_pp", "advantage.clip=1.0", "filter=none")
    shares = [[[make_tokens([1], [1.0])], [make_tokens([2], [0.0])]], [[make_tokens([1], [0.0])], []]]
    crowd = Crowd(2)
    crowd.run(lambda updates: prepare(updates, cfg, crowd.reduce), *shares)
    got = [tokens.advantage_T.tolist() for updates in shares for update in updates for tokens in update]
    assert got == [[1.0], pytest.approx([-1 / math.sqrt(3)] * 2), pytest.approx([-1 / math.sqrt(3)])]


@pytest.mark.parametrize("value", [0.1, 0.3, 2.3, 1e6, -0.7, 0.0])
@pytest.mark.parametrize("count", [3, 7, 1001])
def test_equal_values_whiten_to_exactly_nothing(value, count):
    cfg = make_config("advantage=reinforce_pp", "filter=none")
    shares = [[[make_tokens([count, 5], [value, value])]], [[make_tokens([11], [value])]]]
    crowd = Crowd(2)
    crowd.run(lambda updates: prepare(updates, cfg, crowd.reduce), *shares)
    assert not any(tokens.advantage_T.any() for updates in shares for update in updates for tokens in update)


def test_a_deviation_below_the_floor_is_divided_by_the_floor():
    """Variance 1e-10 is below 1e-8: divided by 1e-4."""
    cfg = make_config("advantage=reinforce_pp", "filter=none")
    tokens = make_tokens([1, 1], [1e-5, -1e-5])
    prepare([[tokens]], cfg, identity)
    assert tokens.advantage_T.tolist() == pytest.approx([0.1, -0.1])


def test_kl_in_the_reward_enters_the_values_once_and_the_loss_not_at_all():
    """Case D02 (a). k1 of old against ref is 0.1, 0.2 | 0.4; a token's value is r - coef x the KL still to come."""
    cfg = make_config(
        "advantage=reinforce_pp",
        "filter=none",
        "loss.use_kl_in_reward=true",
        "loss.kl_coef=0.5",
        "loss.kl_estimator=k1",
    )
    tokens = make_tokens([2, 1], [1.0, 0.0], old_T=[-1.0, -1.0, -1.0], ref_T=[-1.1, -1.2, -1.4])
    loss, _, metrics = loss_and_grad(tokens, [-1.0, -1.0, -1.0], cfg)
    values = numbers([1.0 - 0.5 * 0.3, 1.0 - 0.5 * 0.2, -0.5 * 0.4])
    want = (values - values.mean()) / values.std(correction=0)
    assert tokens.advantage_T.tolist() == pytest.approx(want.tolist())
    assert loss == pytest.approx(0.0)  # ratio 1: minus the mean of the whitened advantages, without a KL term
    assert metrics["kl"] == pytest.approx(0.7 / 3)


def entropy_config(share):
    return make_config(f"loss.top_entropy_quantile={share}", "loss=reinforce")


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2, 0.35, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("count", [1, 2, 5, 100, 1001])
def test_top_entropy_keeps_the_tokens_at_or_above_the_quantile(share, count):
    entropy = torch.rand(count, generator=torch.manual_seed(count), dtype=torch.float64).mul(20).round() / 4  # ties
    tokens = make_tokens([count], [1.0], entropy_T=entropy.tolist())
    prepare([[tokens]], entropy_config(share), identity)
    assert tokens.policy_T.tolist() == (entropy >= torch.quantile(entropy, 1 - share)).double().tolist()


def test_top_entropy_is_of_the_whole_update_and_leaves_the_denominator():
    cfg = entropy_config(0.5)
    shares = [
        [[make_tokens([2], [1.0], entropy_T=[0.1, 0.2])], [make_tokens([1], [1.0], entropy_T=[9.0])]],
        [[make_tokens([2, 1], [1.0, 1.0], [True, False], entropy_T=[0.3, 0.4, 5.0])], []],
    ]
    crowd = Crowd(2)
    crowd.run(lambda updates: prepare(updates, cfg, crowd.reduce), *shares)
    assert [tokens.policy_T.tolist() for (update, _) in shares for tokens in update] == [[0, 0], [1, 1, 1]]
    assert shares[0][1][0].policy_T.tolist() == [1]
    assert shares[0][0][0].weight_T.tolist() == [0.25, 0.25]


def test_entropy_bonus_is_over_all_trained_tokens():
    """-coef x mean entropy, whatever the aggregation and whatever the top-entropy selection keeps."""
    overrides = ("loss.entropy_coef=0.1", "loss.aggregation=seq_mean_token_sum", "loss.top_entropy_quantile=0.3")
    cfg = make_config("loss=reinforce", *overrides)
    tokens = make_tokens([2, 1, 1], [0.0] * 3, [True, True, False], entropy_T=[1.0, 2.0, 3.0, 50.0])
    loss, _, metrics = loss_and_grad(tokens, [-1.0] * 4, cfg, entropy=[1.0, 2.0, 3.0, 50.0])
    assert loss == pytest.approx(-0.1 * 2.0)
    assert metrics["entropy"] == pytest.approx(2.0)


# --- measures ---------------------------------------------------------------------------------------------------------


def test_measures_add_up_over_micro_batches_and_ranks():
    def measure(values, among):
        measures = Measures()
        values, among = numbers(values), torch.tensor(among)
        measures.mean("mean", values, among)
        measures.lowest("low", values, among)
        measures.highest("high", values, among)
        return measures

    shares = [measure([1.0, 100.0], [True, False]).merge(measure([2.0, 6.0], [True, True])), measure([-1.0], [False])]
    assert shares[0].result() == {"mean": 3.0, "low": 1.0, "high": 6.0}
    assert shares[1].result() == {}
    crowd = Crowd(2)

    def largest(tensor):
        crowd.parts[crowd.local.rank] = tensor
        crowd.barrier.wait(timeout=10)
        found = torch.stack(crowd.parts).amax(0)
        crowd.barrier.wait(timeout=10)
        return found

    for result in crowd.run(lambda measures: measures.reduced(crowd.reduce, largest).result(), *shares):
        assert result == {"mean": 3.0, "low": 1.0, "high": 6.0}


def test_float32_stays_float32():
    tokens = make_tokens([3, 2], list(A), old_T=OLD)
    tokens.advantage_N, tokens.old_T = tokens.advantage_N.float(), tokens.old_T.float()
    cfg = make_config(*SEVERAL)
    prepare([[tokens]], cfg, identity)
    loss, _ = policy_loss(torch.tensor(LP), None, tokens, cfg)
    assert loss.dtype == torch.float32
    assert tokens.advantage_T.dtype == tokens.weight_T.dtype == torch.float32
