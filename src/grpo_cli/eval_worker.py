"""One rank of `grpo eval`: a model without trainer or optimizer, its rollout and its rewards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from grpo_cli.checks import check
from grpo_cli.data import load_data
from grpo_cli.errors import ConfigError
from grpo_cli.evaluate import RESULT, evaluate, headline
from grpo_cli.files.jsonio import write_json
from grpo_cli.files.rundir import RunDir
from grpo_cli.model.network import load_causal_lm
from grpo_cli.model.tokenizer import load_tokenizer
from grpo_cli.process.frame import run_worker
from grpo_cli.process.ranks import longest_wait_s, start
from grpo_cli.process.signals import stop
from grpo_cli.reward import make_scorer
from grpo_cli.rollout import Rollout, make_rollout
from grpo_cli.schema import Config, VllmServerRollout


class FrozenPolicy:
    """What a rollout asks of a policy, for a model that nobody trains."""

    def __init__(self, cfg: Config, device: torch.device):
        self.tokenizer = load_tokenizer(cfg.model)
        self.module: Any = load_causal_lm(cfg.model).to(device).eval()
        self.device = device
        self.version = 0
        self._temperature = cfg.rollout.temperature or 1.0

    @contextmanager
    def generation(self) -> Iterator[Any]:
        with torch.no_grad():
            yield self.module

    def gathered_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, parameter.detach()) for name, parameter in self.module.named_parameters())

    @torch.no_grad()
    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
        """Logprobs of `completion_ids` behind `prompt_ids`, at the rollout temperature."""
        ids = torch.tensor([(prompt_ids + completion_ids)[:-1]], device=self.device)
        logits_TV = self.module(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 :].float()
        logprobs_TV = (logits_TV / self._temperature).log_softmax(-1)
        return logprobs_TV.gather(1, torch.tensor(completion_ids, device=self.device)[:, None]).squeeze(1).tolist()


def main() -> NoReturn:
    """`python -m grpo_cli.eval_worker DIR`: evaluate what DIR/config.yaml says into DIR/eval.json."""
    run_worker(lambda: work(RunDir(sys.argv[1])))


def work(directory: RunDir) -> str:
    """Returns the headline."""
    cfg, findings = check(directory.read_config(), "eval")
    errors = [finding for finding in findings if finding.severity == "error"]
    if cfg is None or errors:
        raise ConfigError(errors)
    ranks = start(longest_wait_s(cfg.trainer.step_timeout_s))
    directory.require_shared(ranks.gather)
    with ExitStack() as ending:
        policy = FrozenPolicy(cfg, ranks.device)
        data = load_data(cfg, policy.tokenizer)
        scorer = make_scorer(cfg)
        ending.callback(scorer.close)
        rollout = make_rollout(cfg, policy, ranks)
        ending.callback(rollout.close)
        bring_weights(cfg, policy, rollout)
        stop.rank_file.beat(0, "evaluation")
        metrics = evaluate(cfg, data.eval_prompts(cfg.eval.limit), rollout, scorer, ranks, step=0, version=0)
    if ranks.first:
        write_json(directory.path / RESULT, metrics)
    return headline(cfg, metrics)


def bring_weights(cfg: Config, policy: FrozenPolicy, rollout: Rollout) -> None:
    """Send `model.path` to a server that was there already, and prove it: it holds whatever it was last sent."""
    if isinstance(cfg.rollout, VllmServerRollout) and cfg.rollout.server_url is not None:
        rollout.sync(policy, policy.version)


if __name__ == "__main__":
    main()
