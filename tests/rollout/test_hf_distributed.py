"""Two processes generate at once, one of them for far longer, sharded or not: the tokens are those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from tests import tiny

STAGES = ["0", "2", "3"]


def run(model, out, world: int) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        env = os.environ | {key: str(value) for key, value in place.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "tests.rollout.hf_worker", str(model), str(out), *STAGES]
        log = (out.parent / f"{world}-{rank}.log").open("w")
        processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join((out.parent / f"{world}-{rank}.log").read_text() for rank in range(world))
    return json.loads(out.read_text())


@pytest.mark.slow
def test_two_processes_sample_what_one_does(tmp_path):
    model = tiny.tiny_model(tmp_path / "model")
    one, two = (run(model, tmp_path / f"{world}.json", world) for world in (1, 2))
    for stage in STAGES:
        assert max(one[stage]["gap"], two[stage]["gap"]) < 1e-4
        assert sorted(two[stage]["groups"]) == [f"1-{index}" for index in range(5)]
        for group_id, completions in two[stage]["groups"].items():
            for (tokens, logprobs), (same, known) in zip(completions, one["0"]["groups"][group_id], strict=True):
                assert tokens == same[: len(tokens)]
                assert logprobs == pytest.approx(known[: len(tokens)], abs=1e-4)
    lengths = [len(tokens) for completions in two["3"]["groups"].values() for tokens, _ in completions]
    assert min(lengths) <= 2
    assert max(lengths) > 10
