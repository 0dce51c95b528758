"""The training loop. Every process of a run executes it; it alone composes the stages, which do not know each other."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

from grpo_cli import advantage, evaluate, export
from grpo_cli.batch import pack, write_back
from grpo_cli.checkpoint import store as checkpoint
from grpo_cli.checks import check
from grpo_cli.data import Data, load_data
from grpo_cli.errors import EXIT_OK, ConfigError, SignalStop, exit_code_of
from grpo_cli.files import ledger
from grpo_cli.files.rundir import RunDir
from grpo_cli.filter import Filter, make_filter
from grpo_cli.logger import Logger
from grpo_cli.model.tokenizer import load_tokenizer
from grpo_cli.process.frame import run_worker
from grpo_cli.process.ranks import Ranks, longest_wait_s, start
from grpo_cli.process.signals import Interrupted, stop
from grpo_cli.reward import make_scorer
from grpo_cli.reward.scorer import Scorer
from grpo_cli.rollout import Rollout, make_rollout
from grpo_cli.rollout.source import GroupSource, StepGroups, make_source
from grpo_cli.schema import Config
from grpo_cli.trainer.policy import Policy


def main() -> NoReturn:
    """`python -m grpo_cli.worker RUN_DIR`: train what RUN_DIR/config.yaml says; ends with the exit code of the run."""
    run_worker(lambda: work(RunDir(sys.argv[1])))


@dataclass(slots=True)
class Run:
    """What a run is made of; every rank has all of it."""

    cfg: Config
    dir: RunDir
    ranks: Ranks
    data: Data
    scorer: Scorer
    policy: Policy
    rollout: Rollout
    filter: Filter
    source: GroupSource
    logger: Logger
    last_step: int | None
    """Number of the last step; None where drops decide it."""


def train(run: Run, done: int) -> str:
    """The loop, from the step after `done` to the last; returns how it ended."""
    for step in count(done + 1) if run.last_step is None else range(done + 1, run.last_step + 1):
        groups = generate(run, step)
        if groups is None:
            return f"Every prompt of trainer.epochs={run.cfg.trainer.epochs} was used, in {step - 1} steps."
        is_last = step == run.last_step or (run.last_step is None and run.source.spent())
        stop.rank_file.beat(step, "update")
        advantage.assign(groups.kept, run.cfg)
        batch = pack(groups.kept, run.cfg, run.ranks)
        stats = run.policy.add_logprobs(batch)
        stats |= run.policy.update(batch, step)
        if run.cfg.logger.dump_rollouts:
            write_back(batch, run.ranks)
        stop.rank_file.beat(step, "weight sync")
        try:
            stats |= run.source.sync(run.policy, step)
            stats |= held_out(run, step, is_last)
        finally:  # also where the sync check ends the run
            record(run, step, groups, groups.metrics | stats)
        # An update that was refused as not finite had something to train on: that has a guard of its own.
        trained = stats["updates/applied_count"] + stats["updates/nonfinite_count"] > 0
        run.filter.end_step(groups.kept, groups.dropped, trained)
        run.policy.raise_if_nonfinite(step)
        save_or_stop(run, step, is_last)
    return f"All {run.last_step} steps are done."


def generate(run: Run, step: int) -> StepGroups | None:
    """Rollout, reward and filter of one step; a signal meanwhile saves the state before it. None: no prompt is left."""
    before = run.source.state()
    stop.rank_file.beat(step, "rollout")
    try:
        return run.source.step(step)
    except Interrupted:
        save(run, step - 1, before)
        raise SignalStop(stop_signal(run)) from None


def held_out(run: Run, step: int, is_last: bool) -> dict[str, float]:
    """Accuracy on the held-out prompts after `step` steps, where it is due; a signal skips it."""
    if not evaluate.due(run.cfg, step, is_last):
        return {}
    stop.rank_file.beat(step, "evaluation")
    prompts = run.data.eval_prompts(run.cfg.eval.limit)
    try:
        metrics = evaluate.evaluate(run.cfg, prompts, run.rollout, run.scorer, run.ranks, step, step)
    except Interrupted:
        return {}
    run.logger.note(f"After step {step}: {evaluate.headline(run.cfg, metrics)}.")
    return metrics


def record(run: Run, step: int, groups: StepGroups, metrics: dict[str, float]) -> None:
    """Write down what the step did."""
    stop.rank_file.beat(step, "record")
    if run.ranks.first:
        ledger.append(run.dir, step, groups.kept, groups.dropped, run.data)
        if run.cfg.logger.dump_rollouts:
            run.dir.dump_rollouts(step, [*groups.kept, *groups.dropped])
    run.logger.log(step, metrics)


def save_or_stop(run: Run, step: int, is_last: bool) -> None:
    """A checkpoint where it is due; where any rank was told to stop, a checkpoint and the end."""
    signum = stop_signal(run)
    if signum or checkpoint.due(run.cfg, step, is_last):
        save(run, step, run.source.state())
    if signum:
        raise SignalStop(signum)


def stop_signal(run: Run) -> int:
    """The signal that any rank was told to stop by, the same on every rank; 0 for none."""
    return max(run.ranks.gather(stop.signum))


def save(run: Run, step: int, source_state: dict[str, Any]) -> None:
    """A checkpoint of the state after `step` steps."""
    stop.rank_file.beat(step, "checkpoint")
    state = {"step": step, "source": source_state, "policy": run.policy.state(), "wandb_id": run.logger.wandb_id}
    run.logger.note(f"Saved {checkpoint.save(run.cfg, run.dir, run.ranks, run.policy, state)}.")


def work(directory: RunDir) -> str:
    """One rank's part of a run, from reading its config to the model that it leaves behind."""
    cfg = read_config(directory)
    ranks = start(longest_wait_s(cfg.trainer.step_timeout_s))
    directory.require_shared(ranks.gather)
    with ExitStack() as ending:
        data = load_data(cfg, load_tokenizer(cfg.model))
        scorer = make_scorer(cfg)
        ending.callback(scorer.close)
        filter_ = make_filter(cfg)
        last_step = steps_of(cfg, data, filter_)
        policy = Policy(cfg, ranks, last_step)
        rollout = make_rollout(cfg, policy, ranks)
        ending.callback(rollout.close)
        source = make_source(cfg, data, rollout, scorer, filter_, ranks)
        ending.callback(source.close)
        state = checkpoint.load(cfg, directory, ranks, policy, data)
        done = 0
        if state is not None:
            done = state["step"]
            source.load_state(state["source"])
            policy.load_state(state["policy"])
        wandb_id = state["wandb_id"] if state else None
        logger = Logger(cfg, directory, ranks.first, start_step=done or -1, steps=last_step, wandb_id=wandb_id)
        ending.enter_context(closing(logger))
        run = Run(cfg, directory, ranks, data, scorer, policy, rollout, filter_, source, logger, last_step)
        return start_to_end(run, done)


def start_to_end(run: Run, done: int) -> str:
    """The loop with what comes once, before and after it."""
    for note in run.data.notes:
        run.logger.note(note)
    stop.rank_file.beat(done, "first weight sync")
    run.source.sync(run.policy, done)
    if done == 0 and (before := held_out(run, 0, is_last=False)):
        run.logger.log(0, before)
    run.ranks.barrier()
    stop.arm()
    how = train(run, done)
    export.save_model(run.policy, run.dir.model, run.ranks)
    run.logger.note(f"{how} Model: {run.dir.model}")
    return how


def read_config(directory: RunDir) -> Config:
    """RUN_DIR/config.yaml, judged again by the rules that the parent judged it by. Raises ConfigError."""
    cfg, findings = check(directory.read_config())
    errors = [finding for finding in findings if finding.severity == "error"]
    if cfg is None or errors:
        raise ConfigError(errors)
    return cfg


def steps_of(cfg: Config, data: Data, filter_: Filter) -> int | None:
    """Number of the run's last step; None where the number of drops decides how many steps the prompts fill."""
    if cfg.trainer.steps is not None:
        return cfg.trainer.steps
    if filter_.resamples or cfg.rollout.max_staleness > 0:
        return None
    assert data.total is not None, "steps or epochs is set"
    return math.ceil(data.total / cfg.trainer.prompts_per_step)


@contextmanager
def closing(logger: Logger) -> Iterator[None]:
    """End the logs with the exit code of the run."""
    try:
        yield
    except BaseException as error:
        logger.close(exit_code_of(error))
        raise
    logger.close(EXIT_OK)


if __name__ == "__main__":
    main()
