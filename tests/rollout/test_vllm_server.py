"""Rollout `vllm_server` with real servers: tokens, weight sync through files, the key, and every way to fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time

import httpx
import psutil
import pytest

from grpo_cli.errors import GuardStop, RunError
from grpo_cli.eval_worker import FrozenPolicy, bring_weights
from grpo_cli.rollout import make_rollout, server_process, vllm_server, weight_sync
from grpo_cli.rollout.server_client import Client
from grpo_cli.rollout.vllm_requests import sampling_params
from grpo_cli.types import Prompt
from tests.rollout import engines

pytestmark = [*engines.real_engine, pytest.mark.slow]

ENDS_WITHIN_S = 30.0


def start(directory, *overrides: str):
    policy = engines.Policy(temperature=0.7)
    cfg = engines.config("rollout=vllm_server", "rollout.temperature=0.7", f"run.dir={directory}", *overrides)
    return policy, make_rollout(cfg, policy, engines.RANKS)


def processes_of(rollout) -> list[psutil.Process]:
    server = psutil.Process(rollout._processes[0].pid)
    return [server, *server.children(recursive=True)]


def assert_gone(processes: list[psutil.Process], within_s: float = 10.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The server of this module; the port that it was given first was taken."""
    taken = socket.socket()
    taken.bind((server_process.HOST, 0))
    taken.listen()
    ports = [taken.getsockname()[1]]
    really_free = server_process.free_port
    server_process.free_port = lambda: ports.pop() if ports else really_free()
    try:
        policy, rollout = start(tmp_path_factory.mktemp("run"))
    finally:
        server_process.free_port = really_free
    assert not ports
    assert rollout.client.urls[0] != f"http://{server_process.HOST}:{taken.getsockname()[1]}"
    taken.close()
    processes = processes_of(rollout)
    yield policy, rollout
    rollout.close()
    rollout.close()
    assert_gone(processes)


@pytest.fixture
def server(started):
    policy, rollout = started
    weights = policy.weights()
    yield policy, rollout
    policy.restore(weights)
    rollout.sync(policy, 0)


def test_groups_come_back_in_order_with_the_sampled_tokens(server):
    policy, rollout = server
    asked = engines.prompts(policy, "What is 1 + 2?", "Hi", "What is 11 + 12?")
    groups = rollout.generate(asked, step=3, version=2)
    assert [(group.group_id, group.prompt) for group in groups] == asked
    eos = policy.tokenizer.eos_token_id
    for group in groups:
        assert (group.step, group.policy_version, len(group.completions)) == (3, 2, 4)
        for completion in group.completions:
            assert len(completion.sampler_logprobs) == len(completion.token_ids)
            assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == eos)
    assert engines.largest_gap(policy, groups) < 1e-4
    again = rollout.generate(asked[1:2], step=3, version=2)
    assert [c.token_ids for c in again[0].completions] == [c.token_ids for c in groups[1].completions]


def test_the_engine_in_this_process_samples_the_same_tokens(server):
    policy, rollout = server
    asked = engines.prompts(policy, "What is 1 + 2?", "Hi")
    colocated = make_rollout(engines.config("rollout=vllm", "rollout.temperature=0.7"), policy, engines.RANKS)
    mine = colocated.generate(asked, 1, 0)
    colocated.close()
    theirs = rollout.generate(asked, 1, 0)
    for one, other in zip(mine, theirs, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]


def test_sync_through_files_brings_new_weights_and_leaves_no_file(server):
    policy, rollout = server
    asked = engines.prompts(policy, "Count: " + "one two three " * 20)
    rollout.generate(asked, 1, 0)
    policy.move(0.05)
    assert engines.largest_gap(policy, rollout.generate(asked, 1, 0)) > 0.01
    metrics = rollout.sync(policy, 1)
    assert metrics["sync/logprob_gap_max"] < 1e-4
    assert engines.largest_gap(policy, rollout.generate(asked, 2, 1)) < 1e-4
    assert list(rollout._sender._directory.glob("*")) == []


def test_an_evaluation_brings_its_model_to_a_server_that_holds_another(server, tmp_path, monkeypatch):
    policy, rollout = server
    asked = engines.prompts(policy, "What is 1 + 2?")
    policy.move(0.05)
    rollout.sync(policy, 1)
    monkeypatch.setenv("GRPO_SERVER_KEY", rollout._processes[0].key)
    words = ("rollout=vllm_server", f"rollout.server_url={rollout.client.urls[0]}", "rollout.temperature=0.7")
    cfg = engines.config(*words, f"run.dir={tmp_path}")
    frozen = FrozenPolicy(cfg, policy.device)
    given = make_rollout(cfg, frozen, engines.RANKS)
    try:
        bring_weights(cfg, frozen, given)
        groups = given.generate(asked, 1, 0)
    finally:
        given.close()
    assert engines.largest_gap(policy, groups) > 0.01
    assert engines.largest_gap(engines.Policy(temperature=0.7), groups) < 1e-4
    assert rollout.generate(asked, 1, 0)  # it is not ours to end


def test_a_family_that_did_not_arrive_is_named(server, monkeypatch):
    policy, rollout = server
    broken = lambda policy: ((n, t * 1.5 if "up_proj" in n else t) for n, t in policy.gathered_parameters())  # noqa: E731
    monkeypatch.setattr(weight_sync, "named_copies", broken)
    with pytest.raises(GuardStop, match=r"Weights that differ: model\.layers\.\*\.mlp\.up_proj\.weight \(by [\d.]+ of"):
        rollout.sync(policy, 1)


def test_nobody_gets_in_without_the_key(server):
    url = server[1].client.urls[0]
    assert url.startswith("http://127.0.0.1:")
    for method, path in [
        ("POST", "/collective_rpc"),
        ("POST", "/pause"),
        ("POST", "/inference/v1/generate"),
        ("GET", "/metrics"),
        ("GET", "/health"),
        ("GET", "/server_info"),
    ]:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.request(method, url + path, headers=headers).status_code == 401, path
    port = int(url.rpartition(":")[2])
    listening = [c.laddr.ip for p in processes_of(server[1]) for c in p.net_connections() if c.status == "LISTEN"]
    assert set(listening) <= {"127.0.0.1", "::1"}, (port, listening)


def test_the_key_is_in_no_command_line_and_no_file(server):
    key, log = server[1]._processes[0].key, server[1]._processes[0].log
    assert len(key) > 30
    assert not any(key in argument for process in processes_of(server[1]) for argument in process.cmdline())
    assert key not in log.read_text()


def test_engine_metrics(server):
    metrics = server[1].metrics()
    assert metrics["rollout/vllm_running_requests"] == 0.0
    assert metrics["rollout/vllm_queued_requests"] == 0.0
    assert "rollout/vllm_preemptions_total" in metrics


def test_a_full_disk_at_sync_is_a_clear_error(server, tmp_path):
    policy, rollout = server
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:  # a real full disk takes the right to mount one; the checkpoint's tests do without
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    directory = rollout._sender._directory
    rollout._sender._directory = tmp_path / "weight_sync"
    try:
        with pytest.raises(RunError, match=r"weights cannot be written to .*No space left on device.*run\.dir"):
            rollout.sync(policy, 1)
        assert list((tmp_path / "weight_sync").glob("*")) == []
    finally:
        rollout._sender._directory = directory
        subprocess.run(["umount", tmp_path], check=True)


def test_a_request_that_the_engine_refuses_is_an_error_with_its_words(server):
    policy, rollout = server
    too_long = Prompt("row", "", [5] * 5000, None)
    with pytest.raises(RunError, match=r"refuses POST .*/inference/v1/generate \(400\)"):
        rollout.generate([("1-0", too_long)], 1, 0)
    assert rollout.generate(engines.prompts(policy, "Hi"), 1, 0)


def test_a_dropped_connection_is_tried_again(server):
    """A proxy in between that closes the first two connections in the face of whoever calls."""
    _, rollout = server
    target = int(rollout.client.urls[0].rpartition(":")[2])
    listener = socket.create_server((server_process.HOST, 0))
    threading.Thread(target=flaky_proxy, args=(listener, target, 2), daemon=True).start()
    url = f"http://{server_process.HOST}:{listener.getsockname()[1]}"
    client = Client([url], rollout._processes[0].key, [])
    try:
        request = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "temperature": 0.0}}
        assert len(client.wait(client.generate([request]))[0]["choices"][0]["token_ids"]) == 2
    finally:
        client.close()
        listener.close()


def flaky_proxy(listener: socket.socket, target: int, failures: int) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if failures:
            failures -= 1
            connection.close()
            continue
        upstream = socket.create_connection((server_process.HOST, target))
        for source, sink in ((connection, upstream), (upstream, connection)):
            threading.Thread(target=pump, args=(source, sink), daemon=True).start()


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_dies_or_stands_still_ends_generation_in_time(how, started, tmp_path, monkeypatch):
    policy, rollout = start(tmp_path, "rollout.max_new_tokens=4000", "rollout.num_generations=2")
    endless = lambda *request: {**sampling_params(*request), "ignore_eos": True, "stop_token_ids": []}  # noqa: E731
    monkeypatch.setattr(vllm_server, "sampling_params", endless)
    processes = processes_of(rollout)
    caught: list[tuple[float, Exception]] = []

    def generate() -> None:
        try:
            rollout.generate(engines.prompts(policy, "Hi"), 1, 0)
        except Exception as error:
            caught.append((time.monotonic(), error))

    thread = threading.Thread(target=generate)
    thread.start()
    while not rollout.metrics()["rollout/vllm_running_requests"]:
        assert thread.is_alive(), "it was to be in the middle of a generation"
        time.sleep(0.05)
    os.kill(processes[0].pid, how)
    if how == signal.SIGSTOP:
        for process in processes[1:]:
            process.suspend()
    at = time.monotonic()
    thread.join(2 * ENDS_WITHIN_S)
    assert caught, "it waits still" if thread.is_alive() else "it came to its end"
    ((ended, error),) = caught
    assert ended - at < ENDS_WITHIN_S
    assert isinstance(error, RunError)
    assert "SIGKILL" in str(error) if how == signal.SIGKILL else "SIGSTOP" in str(error)
    if how == signal.SIGKILL:
        assert_gone(processes)  # the engine follows its server by itself
    rollout.close()
    assert_gone(processes)


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(RunError, match=r"(?s)vLLM server .*ended with exit code .*vllm_server\.log"):
        start(tmp_path, "rollout.max_model_len=100000000")
