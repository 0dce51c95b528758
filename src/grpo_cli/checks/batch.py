"""Rules of the batch arithmetic: prompts, generations, updates, processes and the length of the run."""

from __future__ import annotations

from math import gcd

from grpo_cli.checks.engine import Found, View, broken, declare, error, ge, gt, state, warning
from grpo_cli.checks.quantities import context, divisors, multiply, processes, sequences, to_advantage, to_filter

GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "gdpo", "opo", "passk", "maxrl")
"""Estimators that compare the completions of a group."""


@error("rollout.num_generations", "advantage.name")
def group_advantage_needs_two_generations(c: View) -> Found:
    """The estimator compares the completions of one prompt: every one but reinforce_pp does. A group of one has no
    baseline, so every advantage would be 0 or NaN."""
    if c.advantage.name in GROUP_RELATIVE and c.rollout.num_generations < 2:
        yield broken(
            f"advantage.name={c.advantage.name} compares inside a group and needs rollout.num_generations >= 2; it is "
            f"{c.rollout.num_generations}.",
            {"rollout.num_generations": 2},
            to_advantage(c, "reinforce_pp") | to_filter(c, "none"),
        )


@error("filter.name", "rollout.num_generations")
def group_filter_needs_two_generations(c: View) -> Found:
    """Every filter drops a group with fewer than two scored completions. With one generation a prompt that is every
    group: nothing would ever train, and dynamic_sampling would resample for ever."""
    if c.filter.name != "none" and c.rollout.num_generations < 2:
        yield broken(
            f"filter.name={c.filter.name} drops every group of fewer than two completions, so it needs "
            f"rollout.num_generations >= 2; it is {c.rollout.num_generations}.",
            to_filter(c, "none"),
            {"rollout.num_generations": 2},
        )


@error("trainer.updates_per_step", "trainer.prompts_per_step", "rollout.num_generations")
def updates_have_sequences(c: View) -> Found:
    """There are more optimizer updates a step than sequences. Some updates would hold no sequence at all: fewer
    optimizer steps than asked."""
    if sequences(c) < c.trainer.updates_per_step:
        yield broken(
            f"trainer.updates_per_step={c.trainer.updates_per_step} is more than the {multiply(c)}; at most "
            f"{sequences(c)} works.",
            {"trainer.updates_per_step": sequences(c)},
        )


@warning("trainer.updates_per_step", "trainer.prompts_per_step", "rollout.num_generations")
def sequences_divide_into_updates(c: View) -> Found:
    """The sequences of a step do not divide into the updates. Updates of unequal size weigh some sequences more than
    others; the run goes on, since counts are reduced over the whole update."""
    count, updates = sequences(c), c.trainer.updates_per_step
    if count >= updates and count % updates != 0:
        working = divisors(count, updates)
        yield broken(
            f"{multiply(c)} do not divide into trainer.updates_per_step={updates}; "
            f"{', '.join(map(str, working))} would.",
            {"trainer.updates_per_step": working[0]},
        )


@warning("trainer.prompts_per_step", "rollout.num_generations", "trainer.nproc_per_node", "trainer.nnodes")
def sequences_divide_over_processes(c: View) -> Found:
    """The sequences of a step do not divide over the processes. Processes get unequal shares, and the others wait for
    the largest in every collective."""
    count, world = sequences(c), processes(c)
    if count % world != 0:
        unit = world // gcd(world, c.rollout.num_generations)
        working = -(-c.trainer.prompts_per_step // unit) * unit
        yield broken(
            f"{multiply(c)} do not divide over {world} processes (trainer.nproc_per_node={c.trainer.nproc_per_node} x "
            f"trainer.nnodes={c.trainer.nnodes}); multiples of {unit} prompts do.",
            {"trainer.prompts_per_step": working},
        )


@warning("trainer.updates_per_step", "trainer.prompts_per_step", "rollout.num_generations", "trainer.nproc_per_node")
def update_feeds_every_process(c: View) -> Found:
    """An update has fewer sequences than there are processes. Some processes hold no sequence in any update, yet wait
    in each of its collectives."""
    count, updates, world = sequences(c), c.trainer.updates_per_step, processes(c)
    if count >= updates and count < updates * world:
        fewer = [{"trainer.updates_per_step": count // world}] if count >= world else []
        prompts = -(-updates * world // c.rollout.num_generations)
        yield broken(
            f"{multiply(c)} in trainer.updates_per_step={updates} updates feed fewer than the {world} processes; "
            f"{updates * world} sequences a step would.",
            *fewer,
            {"trainer.prompts_per_step": prompts},
        )


@error("trainer.micro_batch_tokens", "data.max_prompt_tokens", "rollout.max_new_tokens")
def micro_batch_fits_longest_sequence(c: View) -> Found:
    """The longest allowed prompt and completion together are longer than a micro-batch. The first completion of that
    length would crash or be cut, hours into the run."""
    if c.trainer.micro_batch_tokens < context(c):
        yield broken(
            f"trainer.micro_batch_tokens={c.trainer.micro_batch_tokens} is less than the {context(c)} tokens of the "
            f"longest sequence (data.max_prompt_tokens={c.data.max_prompt_tokens} + "
            f"rollout.max_new_tokens={c.rollout.max_new_tokens}).",
            {"trainer.micro_batch_tokens": context(c)},
        )


@warning("trainer.micro_batch_tokens", "trainer.packing", "data.max_prompt_tokens", "rollout.max_new_tokens")
def shared_prefix_fits_two_completions(c: View) -> Found:
    """packing=shared_prefix computes a prompt once for several completions. Where two long completions do not fit
    into one micro-batch behind their prompt, no prompt is ever shared."""
    needed = context(c) + c.rollout.max_new_tokens
    if c.trainer.packing == "shared_prefix" and c.trainer.micro_batch_tokens < needed:
        yield broken(
            f"trainer.micro_batch_tokens={c.trainer.micro_batch_tokens} does not hold a prompt and two completions "
            f"({needed} tokens), so trainer.packing=shared_prefix shares nothing.",
            {"trainer.micro_batch_tokens": needed},
            {"trainer.packing": "sequence"},
        )


@error("trainer.steps", "trainer.epochs")
def run_length_given(c: View) -> Found:
    """Neither trainer.steps nor trainer.epochs is set. The run would never end, and no schedule has a length."""
    if c.trainer.steps is None and c.trainer.epochs is None:
        yield broken("trainer.steps and trainer.epochs are both null.", {"trainer.steps": 100}, {"trainer.epochs": 1})


@error("trainer.epochs", "trainer.steps")
def run_length_given_once(c: View) -> Found:
    """Both trainer.steps and trainer.epochs are set. The limit that is reached first ends the run; the other would be
    ignored silently."""
    if c.trainer.steps is not None and c.trainer.epochs is not None:
        yield broken(
            f"{state(c, 'trainer.steps', 'trainer.epochs')}: one of them ends the run, the other is ignored.",
            {"trainer.epochs": None},
            {"trainer.steps": None},
        )


@warning("trainer.warmup_steps", "trainer.steps")
def warmup_shorter_than_run(c: View) -> Found:
    """The warm-up is as long as the run or longer. The learning rate that was asked for is never reached."""
    if c.trainer.steps is not None and ge(c.trainer.warmup_steps, c.trainer.steps):
        yield broken(
            f"trainer.warmup_steps={c.trainer.warmup_steps} is not below trainer.steps={c.trainer.steps}: "
            "trainer.lr is never reached.",
            {"trainer.warmup_steps": c.trainer.steps // 10},
        )


@error("trainer.steps", "trainer.epochs", "trainer.lr_schedule", "filter.name", "rollout.max_staleness")
def decay_needs_known_length(c: View) -> Found:
    """A decaying learning rate needs the number of steps. With trainer.epochs alone it is known only where every
    prompt makes the same number of groups: not with dynamic sampling, nor with stale groups that are dropped."""
    unknown = c.filter.name == "dynamic_sampling" or gt(c.rollout.max_staleness, 0)
    if c.trainer.lr_schedule != "constant" and c.trainer.steps is None and unknown:
        why = "dynamic sampling" if c.filter.name == "dynamic_sampling" else "stale rollouts"
        yield broken(
            f"trainer.lr_schedule={c.trainer.lr_schedule} needs a number of steps, but trainer.steps=null and {why} "
            "make the steps of an epoch depend on drops.",
            {"trainer.steps": 100, "trainer.epochs": None},
            {"trainer.lr_schedule": "constant"},
        )


declare(
    "data_covers_one_step", "error", "batch", "start", "trainer.prompts_per_step", "data.train",
    why="""There are fewer usable prompts (after data.on_long_prompt) than trainer.prompts_per_step. No step could
    fill; the run would end without an update and exit 0. Lower trainer.prompts_per_step, or add prompts.""",
)  # fmt: skip
