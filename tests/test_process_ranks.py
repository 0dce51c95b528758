"""Process group of one, shares of cores, leaving."""

import subprocess
import sys

import pytest
import torch

from grpo_cli.process import ranks


def test_one_process_needs_no_launcher():
    code = (
        "import torch\nfrom grpo_cli.process import ranks\nr = ranks.start()\n"
        "assert (r.rank, r.world, r.first) == (0, 1, True)\n"
        "assert r.gather({'a': 1}) == [{'a': 1}]\n"
        "assert r.sum(torch.tensor([2.0])).item() == 2.0 and r.max(torch.tensor(3)).item() == 3\n"
        "assert r.any(True) and not r.any(False)\nr.barrier()\nprint('flushed', end='')\nranks.leave(7)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "flushed"), done.stderr


@pytest.mark.parametrize(
    ("count", "world", "shares"),
    [
        (2, 2, [[0], [1]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (1, 2, [[0], [0]]),
        (2, 3, [[0], [1], [0]]),
        (4, 1, [[0, 1, 2, 3]]),
    ],
)
def test_shares_of_cores_are_disjoint_and_cover_all(count, world, shares):
    assert [ranks.share_of_cores(list(range(count)), rank, world) for rank in range(world)] == shares


def test_reductions_leave_their_argument_alone():
    alone = ranks.Ranks(0, 1, 0, torch.device("cpu"))
    values = torch.tensor([1.0, 2.0])
    alone.sum(values)
    assert values.tolist() == [1.0, 2.0]
