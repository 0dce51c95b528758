"""Several nodes: their launchers meet, train as one, and end together. Here the nodes are launchers on one machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_cli.errors import ConfigError
from grpo_cli.files.rundir import RunDir
from grpo_cli.process import network

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src"

LAUNCH = """
import json, sys
from grpo_cli import launch
launch.MEETING_S = int(sys.argv[3])
sys.exit(launch.launch(json.loads(sys.argv[1]), sys.argv[2], "scripted_worker"))
"""


@pytest.fixture
def nodes():
    """Starts commands; none of them outlives the test."""
    started: list[subprocess.Popen] = []

    def start(command: list[str], **environment: str) -> subprocess.Popen:
        paths = os.pathsep.join([str(SOURCES), str(TESTS)])
        env = {**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "WANDB_API_KEY": "k" * 40, **environment}
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def scripted(nodes, run_dir: Path, meeting: str, script: str, meeting_s: int = 60) -> subprocess.Popen:
    """A node of two whose only rank does what `script` says."""
    trainer = {"nnodes": 2, "nproc_per_node": 1, "rdzv_endpoint": meeting, "steps": 5, "step_timeout_s": 60.0}
    cfg = {"run": {"seed": 7, "name": "r"}, "trainer": trainer}
    return nodes([sys.executable, "-c", LAUNCH, json.dumps(cfg), str(run_dir), str(meeting_s)], SCRIPT=script)


def ended(process: subprocess.Popen, run_dir: Path) -> tuple[int, str, str]:
    """(exit code, standard error, reason in run.json)"""
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors, json.loads((run_dir / "run.json").read_text())["reason"]


def test_the_rank_that_is_left_names_the_loss(nodes, tmp_path):
    meeting = endpoint()
    started = {name: scripted(nodes, tmp_path / name, meeting, "lost") for name in "ab"}
    ends = sorted(ended(process, tmp_path / name) for name, process in started.items())
    assert [code for code, _, _ in ends] == [1, 1]
    assert any("Rank 1 died of SIGKILL" in reason for _, _, reason in ends)
    assert any("Rank 0 lost a rank of another node (" in reason for _, _, reason in ends)
    assert not any("Traceback" in errors for _, errors, _ in ends)


def test_a_node_alone_says_where_it_waited(nodes, tmp_path):
    meeting = endpoint()
    code, errors, reason = ended(scripted(nodes, tmp_path / "run", meeting, "done", meeting_s=3), tmp_path / "run")
    assert code == 1
    assert f"Not all of trainer.nnodes=2 nodes met at trainer.rdzv_endpoint={meeting} within 3 seconds" in reason
    assert reason in errors
    assert "Traceback" not in errors


def test_a_node_that_waits_for_the_others_can_be_stopped(nodes, tmp_path):
    process = scripted(nodes, tmp_path / "run", endpoint(), "done")
    while not (tmp_path / "run" / "run.json").exists():
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    code, _, reason = ended(process, tmp_path / "run")
    assert code == 128 + signal.SIGTERM
    assert reason == "Stopped before the first step; nothing was saved."


def test_two_nodes_train_as_one_run(nodes, tmp_path):
    """One run directory, two machines with names of their own that no name server knows."""
    named = shutil.which("unshare")
    if named is None or subprocess.run([named, "--uts", "true"], capture_output=True).returncode:
        pytest.skip("a machine with another name needs the right to `unshare --uts`")
    run = tmp_path / "run"
    train = [sys.executable, "-m", "grpo_cli.cli", "train", "+experiment=smoke", "trainer.steps=2", f"run.dir={run}"]
    train += ["trainer.nnodes=2", f"trainer.rdzv_endpoint={endpoint()}", "trainer.zero_stage=2", "trainer.save_every=2"]
    line = 'hostname "$0"; exec "$@"'
    for process in [nodes([named, "--uts", "sh", "-c", line, f"node-{name}.invalid", *train]) for name in "ab"]:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    state = json.loads((run / "run.json").read_text())
    assert (state["status"], state["step"]) == ("done", 2)
    assert state["host"].startswith("node-")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["sync/logprob_gap_max"] for row in rows) < 1e-4
    saved = {path.name for path in (run / "checkpoints" / "step_000002").iterdir()}
    assert {"manifest.json", "slices_00000.safetensors", "slices_00001.safetensors"} <= saved


def test_nodes_with_directories_of_their_own_are_refused(tmp_path):
    """Each would keep its ranks' part of every checkpoint."""
    directories = [RunDir.create(tmp_path / name) for name in "ab"]
    for directory in directories:
        directory.begin(seed=0, steps=1)

    class TwoNodes:
        def __init__(self, *seen: RunDir):
            self.seen = seen

        def gather(self, mine: tuple[str, ...]) -> list[tuple[str, ...]]:
            assert mine == self.seen[0].attempt()
            return [directory.attempt() for directory in self.seen]

    directories[0].require_shared(TwoNodes(directories[0], RunDir(tmp_path / "a")).gather)
    with pytest.raises(ConfigError, match=r"nodes_share_the_run_dir\] Fix: run\.dir=DIR") as refused:
        directories[0].require_shared(TwoNodes(*directories).gather)
    assert f"{tmp_path / 'a'} of {socket.gethostname()}; {tmp_path / 'b'} of" in str(refused.value)


def test_addresses():
    assert network.host_and_port("node0:29500") == ("node0", 29500)
    assert network.host_and_port("[fe80::1]:29500") == ("fe80::1", 29500)
    assert network.host_and_port("node0") == ("node0", network.MEETING_PORT)
    for wrong in ("", "node0:port", "node0:70000", "node0:0", "http://node0:29500", "user@node0:29500"):
        with pytest.raises(ValueError, match=r"HOST:PORT|[Pp]ort"):
            network.host_and_port(wrong)
    assert network.address_towards("127.0.0.1", 80) == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        network.address_towards("nowhere.invalid", 80)
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("203.0.113.7") is None


def test_who_listens_at_the_meeting_point():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not network.can_listen("127.0.0.1", port)
    assert network.can_listen("127.0.0.1", port)
    assert not network.can_listen("203.0.113.7", 29500)  # of another machine
