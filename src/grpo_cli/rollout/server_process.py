"""A vLLM server that the run starts, watches and ends: on loopback, behind a key of its own, never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from grpo_cli.errors import RunError
from grpo_cli.process.signals import stop
from grpo_cli.rollout import server_auth

HOST = "127.0.0.1"
START_TIMEOUT_S = 1800.0
"""A large model is long in loading; a server that ends is noticed at once."""

PORT_TRIES = 3
_KILL_AFTER_S = 5.0
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class ServerProcess:
    """One server with its engine, in a process group of its own."""

    def __init__(
        self,
        options: Mapping[str, Any],
        cores: list[int] | None,
        devices: list[int] | None,
        log: Path,
        key: str,
        trusted: bool = False,
    ):
        """Nothing runs before `spawn`; `start_all` also waits.

        Args:
            options: vLLM's engine and server arguments by their Python names.
            cores: the CPU cores it may use; None is all of ours.
            devices: the accelerators it may see, by our own numbers; None is none.
            log: where its output goes.
            trusted: it may unpickle what comes with the key (memory handles of `ipc` are sent so).
            key: what requests must show.
        """
        self.key = key
        self.log = log
        self._trusted = trusted
        self._options, self._cores, self._devices = dict(options), cores, devices
        self._process: subprocess.Popen[bytes] | None = None
        self._group: int | None = None
        self._tries, self._deadline = 0, 0.0
        self.url = ""

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        """Start the process, on a port that is free now."""
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        self._tries += 1
        self._deadline = time.monotonic() + START_TIMEOUT_S
        options = {**self._options, "host": HOST, "port": port, "middleware": server_auth.CLASS_PATH}
        cores = "-" if self._cores is None else ",".join(map(str, self._cores))
        command = [sys.executable, "-P", "-m", "grpo_cli.rollout.server_main", str(os.getpid()), cores, *flags(options)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its children are in its group, so that all of them can be ended
            )
        self._group = self._process.pid

    def _environment(self) -> dict[str, str]:
        from grpo_cli.rollout.vllm import LAUNCHER_PREFIXES, LAUNCHER_VARIABLES

        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in LAUNCHER_VARIABLES
            and name != "VLLM_ENABLE_V1_MULTIPROCESSING"
            and not name.startswith(LAUNCHER_PREFIXES)
        }
        own = {
            server_auth.KEY_VARIABLE: self.key,
            "VLLM_SERVER_DEV_MODE": "1",  # the endpoints that update weights
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        if self._trusted:
            own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        defaults = {"VLLM_LOGGING_LEVEL": "WARNING"}
        if self._devices is not None:
            own["CUDA_VISIBLE_DEVICES"] = visible_devices(self._devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
        else:
            own["TORCHDYNAMO_DISABLE"] = "1"  # the first request would compile a helper for a quarter of a minute
            own["OMP_NUM_THREADS"] = str(len(self._cores or os.sched_getaffinity(0)))
            # The trainer, the server and its engine share the cores: a thread that waits must not keep one busy.
            defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "PASSIVE"}
        return {**defaults, **inherited, **own}

    def ready(self, http: httpx.Client) -> bool:
        """Whether it answers by now; one whose port somebody took meanwhile is started again with another."""
        try:
            self.check()
        except RunError:
            if self._tries == PORT_TRIES or "address already in use" not in self._log_end(40).lower():
                raise
            self.close()
            self.spawn()
            return False
        if time.monotonic() > self._deadline:
            raise RunError(f"The vLLM server did not answer within {START_TIMEOUT_S:g} s. {self._explain()}")
        with contextlib.suppress(httpx.TransportError):
            return http.get(f"{self.url}/health", headers=authorization(self.key)).status_code == httpx.codes.OK
        return False

    def check(self) -> None:
        """Raise RunError when the server has ended, or one of its processes is stopped."""
        if self._process is None:
            raise RunError("The vLLM server is not running.")
        code = self._process.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise RunError(f"The vLLM server (process {self._process.pid}) {how}. {self._explain()}")

    def stopped(self) -> bool:
        """Whether a process of the server is stopped, by SIGSTOP or a debugger."""
        if self._process is None:
            return False
        with contextlib.suppress(psutil.Error):
            server = psutil.Process(self._process.pid)
            return any(process.status() in _STOPPED for process in [server, *server.children(recursive=True)])
        return False

    def close(self) -> None:
        """End the server and everything that it started; may be called twice."""
        if self._process is None:
            return
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_AFTER_S)
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _signal_group(self, signum: signal.Signals) -> None:
        assert self._group is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signum)

    def _explain(self) -> str:
        return f"The end of its log, {self.log}:\n{self._log_end(15)}"

    def _log_end(self, lines: int) -> str:
        with contextlib.suppress(OSError):
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 16384))
                text = file.read().decode("utf-8", errors="replace")
            return "\n".join(text.splitlines()[-lines:])
        return ""


def start_all(servers: Sequence[ServerProcess]) -> None:
    """Start servers side by side, and wait until each of them answers.

    Raises RunError as soon as one cannot come up, with the end of its log. By this one thread: the kernel ends what a
    thread started with that thread.
    """
    for server in servers:
        server.spawn()
    waiting = list(servers)
    with httpx.Client(timeout=2.0, trust_env=False) as http:
        while waiting := [server for server in waiting if not server.ready(http)]:
            stop.check()
            time.sleep(0.2)


def authorization(key: str | None) -> dict[str, str]:
    """The header that `server_auth.RequireKey` wants."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def free_port(address: str = HOST) -> int:
    """A port of one of our addresses that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def visible_devices(devices: Sequence[int], ours: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a server on `devices`, numbered as we see them under our own (`ours`; None: unset).

    >>> visible_devices([1], "4,5,6"), visible_devices([1, 2], None)
    ('5', '1,2')
    """
    names = None if ours is None else ours.split(",")
    return ",".join(str(device) if names is None else names[device].strip() for device in devices)


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command-line flags of vLLM arguments given by their Python names.

    >>> flags({"max_model_len": -1, "enforce_eager": True, "enable_prefix_caching": False, "config": {"a": 1}})
    ['--max-model-len=-1', '--enforce-eager', '--no-enable-prefix-caching', '--config={"a": 1}']
    """
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            found.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return found
