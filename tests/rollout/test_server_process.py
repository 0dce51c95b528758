"""Servers of the run's own: which devices they are shown, how they start, and that their engines end with them."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from grpo_cli.errors import RunError
from grpo_cli.rollout.server_process import ServerProcess, start_all, visible_devices


@pytest.mark.parametrize(
    ("devices", "ours", "shown"),
    [
        ([1, 2], None, "1,2"),
        ([1], "4,5,6", "5"),  # our second device is the machine's sixth
        ([2, 0], "GPU-a, GPU-b, GPU-c", "GPU-c,GPU-a"),
    ],
)
def test_devices_are_numbered_as_the_run_sees_them(devices, ours, shown):
    assert visible_devices(devices, ours) == shown


LOADING = """
import multiprocessing, os, sys, time

def load():
    print("loading", os.getpid(), flush=True)
    time.sleep(600)

def main():
    engine = multiprocessing.get_context(os.environ["HOW"]).Process(target=load)
    engine.start()
    engine.join()
"""

STARTING = """
import http.server, os, sys, time
from pathlib import Path

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def main():
    options = dict(flag.removeprefix("--").partition("=")[::2] for flag in sys.argv[1:])
    if options.get("fails"):
        sys.exit("no such model")
    Path(options["here"]).touch()
    while not Path(options["other"]).exists():
        time.sleep(0.05)
    http.server.HTTPServer(("127.0.0.1", int(options["port"])), Health).serve_forever()
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """engine(text): what the server process takes for vLLM."""

    def write(text):
        package = tmp_path / "packages" / "vllm" / "entrypoints" / "launchers" / "api_server"
        package.mkdir(parents=True)
        for parent in [package, *package.parents][:4]:
            (parent / "__init__.py").touch()
        (package / "entry.py").write_text(text)
        monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), *sys.path])

    return write


def server(tmp_path, number=0, **options):
    return ServerProcess(options, cores=None, devices=None, log=tmp_path / f"{number}.log", key="key")


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_an_engine_ends_with_a_server_that_is_killed_while_it_loads(how, engine, tmp_path, monkeypatch):
    engine(LOADING)
    monkeypatch.setenv("HOW", how)
    started = server(tmp_path)
    started.spawn()
    try:
        deadline = time.monotonic() + 60
        while "loading" not in (text := started.log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        loading = psutil.Process(int(text.split()[1]))
        assert loading.is_running()
        os.kill(started.pid, signal.SIGKILL)
        loading.wait(10.0)
    finally:
        started.close()


def test_servers_start_side_by_side(engine, tmp_path):
    """Each answers only once the other was started, too."""
    engine(STARTING)
    marks = [str(tmp_path / name) for name in "ab"]
    servers = [server(tmp_path, n, here=marks[n], other=marks[1 - n]) for n in (0, 1)]
    try:
        start_all(servers)
        assert len({started.url for started in servers}) == 2
    finally:
        for started in servers:
            started.close()


def test_a_server_that_cannot_start_ends_the_wait_for_the_others(engine, tmp_path):
    engine(STARTING)
    patient = server(tmp_path, 0, here=str(tmp_path / "a"), other=str(tmp_path / "never"))
    servers = [patient, server(tmp_path, 1, fails="yes")]
    try:
        with pytest.raises(RunError, match=r"(?s)ended with exit code 1.*1\.log.*no such model"):
            start_all(servers)
    finally:
        for started in servers:
            started.close()
