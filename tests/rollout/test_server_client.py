"""The client of vLLM servers against a small scripted one: connections, limits, retries, and who hears of progress."""

from __future__ import annotations

import asyncio
import resource
import time

import psutil
import pytest

from grpo_cli.errors import RunError
from grpo_cli.process.signals import stop
from grpo_cli.rollout import server_client
from grpo_cli.rollout.server_client import Client
from tests.rollout.scripted_server import ScriptedServer

REQUEST = {"token_ids": [1]}


@pytest.fixture
def serve():
    """serve(answer) -> (server, client); both end with the test."""
    started = []

    def make(answer):
        server = ScriptedServer(answer)
        client = Client([server.url], None, [])
        started.extend([client, server])
        return server, client

    yield make
    for each in started:
        each.close()


def test_a_paused_server_is_reached_although_more_completions_wait_than_there_are_connections(serve, monkeypatch):
    """The server holds completions while it is paused: they keep all of their connections until it resumes."""
    monkeypatch.setattr(server_client, "_CONNECTIONS", 8)
    going = asyncio.Event()
    going.set()

    async def answer(path, body):
        if "generate" in path and not (body or {}).get("priority"):
            await going.wait()
            await asyncio.sleep(0.05)
            await going.wait()
        elif path == "/pause":
            going.clear()
        elif path == "/resume":
            going.set()
        return {"results": [None]}

    server, client = serve(answer)
    completions = client.submit(client.generate([REQUEST] * 60))
    while server.paths().count("/inference/v1/generate") < 10:
        time.sleep(0.01)
    client.wait(client.everywhere("POST", "/pause", params={"mode": "keep"}))
    client.wait(client.call("grpo_load", path="weights"))
    client.wait(client.ask(client.urls[0], [{**REQUEST, "priority": -1}] * 16))  # the sync check
    assert not completions.done()
    client.wait(client.everywhere("POST", "/resume"))
    assert len(completions.result(60.0)) == 60


def test_an_answer_at_the_very_moment_of_looking_away_is_taken(serve, monkeypatch):
    """`wait` looks up twice a second; what is done between its time-out and its question is no time-out."""

    class JustNow:
        def result(self, timeout=None):
            if timeout is not None:
                raise TimeoutError
            return "the answer"

        def done(self):
            return True

    async def answer(path, body):
        return {}

    _, client = serve(answer)
    with monkeypatch.context() as patched:
        patched.setattr(client, "submit", lambda work: JustNow())
        assert client.wait(None) == "the answer"


@pytest.fixture
def limits():
    """The limits of open files, put back afterwards; gives how many are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield psutil.Process().num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_of_open_files_is_raised_for_the_connections(limits, monkeypatch):
    monkeypatch.setattr(server_client, "_CONNECTIONS", 300)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits + 100, hard))
    assert server_client.room_for_connections() == 300
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits + server_client._OTHER_FILES + 300, hard)


def test_what_the_hard_limit_leaves_bounds_the_connections(limits, serve, monkeypatch):
    """As `ulimit -Hn`: nothing can be raised. More completions than files are asked for, a few at a time."""
    open_at_once, most = 0, 0

    async def answer(path, body):
        nonlocal open_at_once, most
        open_at_once += 1
        most = max(most, open_at_once)
        await asyncio.sleep(0.02)
        open_at_once -= 1
        return {}

    monkeypatch.setattr(server_client.resource, "setrlimit", lambda *_: None)
    room = server_client._OTHER_FILES + 20
    monkeypatch.setattr(server_client.resource, "getrlimit", lambda _: (limits + room, limits + room))
    client = serve(answer)[1]
    assert len(client.wait(client.generate([REQUEST] * 60))) == 60
    assert most <= 20


def test_too_many_open_files_are_said_to_be_ours_and_at_once(limits, serve):
    async def answer(path, body):
        return {}

    client = serve(answer)[1]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    client.wait(client.everywhere("GET", "/health"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    began = time.monotonic()
    with pytest.raises(RunError, match=r"No file can be opened .*raise `ulimit -n`"):
        client.wait(client.generate([REQUEST]))
    assert time.monotonic() - began < server_client.DEAD_AFTER_S / 2


def test_a_dropped_connection_is_tried_again_unless_it_must_be_once(serve):
    drops = {"/update_weights": 1, "/pause": 2}

    async def answer(path, body):
        drops[path] = drops.get(path, 0) - 1
        return {} if drops[path] < 0 else None

    server, client = serve(answer)
    client.wait(client.everywhere("POST", "/pause"))
    assert server.paths() == ["/pause"] * 3
    with pytest.raises(RunError, match=r"does not answer POST .*/update_weights"):
        client.wait(client.everywhere("POST", "/update_weights", once=True))
    assert server.paths().count("/update_weights") == 1


def test_whoever_waits_tells_the_watchdog_of_every_completion_and_of_nothing_else(serve, monkeypatch):
    beats = []
    monkeypatch.setattr(stop.rank_file, "alive", lambda: beats.append(time.monotonic()))

    async def answer(path, body):
        if body == {**REQUEST, "late": True}:
            await asyncio.sleep(0.6)
        elif path == "/slow":
            await asyncio.sleep(1.5)
        return {}

    client = serve(answer)[1]
    client.wait(client.everywhere("POST", "/slow"))
    assert beats == []

    async def one_after_the_other():  # as an asynchronous run waits: for a group, while others are made
        for _ in range(3):
            await client.generate([{**REQUEST, "late": True}])

    client.wait(one_after_the_other())
    assert len(beats) >= 2
