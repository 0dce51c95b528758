"""What each process of test_hf_distributed.py runs: python -m tests.rollout.hf_worker MODEL OUT STAGE..."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grpo_cli.process import ranks
from grpo_cli.process.ranks import Ranks
from grpo_cli.rollout import make_rollout
from grpo_cli.rollout.sampling import Sampling
from grpo_cli.trainer.policy import Policy
from grpo_cli.types import Prompt
from tests import tiny


def rollouts(model: str, stage: str, processes: Ranks) -> dict[str, Any]:
    """Tokens and logprobs by group id, of all ranks, and the gap that the sync check finds.

    The first rank's completions end after two tokens, the others' after thirty: nobody may wait for another's token.
    """
    cfg = tiny.config(f"model.path={model}", f"trainer.zero_stage={stage}", "rollout.temperature=0.8")
    policy = Policy(cfg, processes)
    rollout = make_rollout(cfg, policy, processes)
    prompts = [(f"1-{i}", Prompt(f"row-{i}", "", [5 + i, 6, 7 + 2 * i][: 1 + i % 3], None)) for i in range(5)]
    mine = prompts[processes.rank :: processes.world]
    length = 2 if processes.rank == 0 and processes.world > 1 else 30
    groups = rollout.generate(mine, 1, 0, Sampling(n=3, max_new_tokens=length, temperature=0.8))
    found = {g.group_id: [(c.token_ids, c.sampler_logprobs) for c in g.completions] for g in groups}
    gap = rollout.sync(policy, 1)["sync/logprob_gap_max"]
    return {"gap": gap, "groups": {key: value for share in processes.gather(found) for key, value in share.items()}}


def main(model: str, out: str, *stages: str) -> None:
    processes = ranks.start(timeout_s=60)
    found = {stage: rollouts(model, stage, processes) for stage in stages}
    if processes.first:
        Path(out).write_text(json.dumps(found))
    processes.barrier()
    ranks.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
