"""Worker processes that score: bounded in time and memory, replaced when they die, gone when the trainer is.

A process pool of the standard library or of a package would import the trainer's main module, torch and all, into every
worker, hand it the whole environment and unpickle its answers. None of that suits processes that grade model text.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpo_cli
from grpo_cli.errors import RunError
from grpo_cli.files.redact import is_own_secret
from grpo_cli.process.signals import stop
from grpo_cli.reward.worker import receive_frame, send_frame

START_S = 120.0
"""Seconds for a worker's imports: a user's file may load a reward model."""
CLOSE_S = 1.0
"""Seconds that workers get to end by themselves when their sockets close."""
LOOK_S = 0.2
"""Seconds between two looks at whether the run was told to stop."""
REPLY_BYTES = 64 << 20
"""Longest reply that is read."""
KEPT = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "OPENBLAS_CORETYPE")
"""Environment of a worker that grades model text: these, and nothing secret."""
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers of one term run: `make(options)` of the module `grpo_cli.reward.{kind}`."""

    kind: Literal["math", "regex", "reasoning_gym", "python"]
    options: Mapping[str, Any]
    memory_bytes: int | None
    """Address space of a worker; None for a user's own function, which may load a model."""

    def environment(self) -> dict[str, str]:
        """Variables of a worker: a short list, or for a user's function all but the tool's keys and the launcher's."""
        if self.kind == "python":
            return {k: v for k, v in os.environ.items() if not is_own_secret(k) and not k.startswith(LAUNCHER)}
        kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith("LC_")}
        return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no values. `contract`: the function broke its promise; `died`: its process did."""

    kind: Literal["timeout", "died", "error", "contract"]
    reason: str
    where: str = ""
    """The prompts that one failed call was about; empty where it was about one completion."""


Reply = list[float | None] | Failure


class _Worker:
    """One process and the socket to it."""

    def __init__(self, job: Job):
        self._socket, theirs = socket.socketpair()
        code = "import sys; sys.path.insert(0, sys.argv[1]); from grpo_cli.reward.worker import main; main()"
        root = str(Path(grpo_cli.__file__).resolve().parents[1])
        limits = [str(theirs.fileno()), str(os.getpid()), str(job.memory_bytes or 0)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, root, *limits],
                env=job.environment(),
                stdin=subprocess.DEVNULL,
                # A user's prints belong on the console; a grammar's complaints about model text do not.
                stdout=2 if job.kind == "python" else subprocess.DEVNULL,
                stderr=None if job.kind == "python" else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.deadline = time.monotonic() + START_S
        self.ready = False
        self.task: int | None = None
        self.send((job.kind, dict(job.options)))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Raises OSError when the process is gone, or does not read."""
        self._socket.settimeout(max(0.1, self.deadline - time.monotonic()))
        send_frame(self._socket, pickle.dumps(message))

    def receive(self) -> Mapping[str, Any]:
        """The reply that has begun to come; OSError, EOFError or ValueError when none does."""
        self._socket.settimeout(5.0)
        reply = json.loads(receive_frame(self._socket, REPLY_BYTES))
        if not isinstance(reply, dict):
            raise ValueError("no reply")
        return reply

    def hang_up(self) -> None:
        """Closes the socket: a worker that waits for a request ends by itself."""
        self._socket.close()

    def kill(self) -> int:
        """Ends the process and all that it started; its exit code."""
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def wait(self, deadline: float) -> None:
        """Lets it end until a time, if it has anything to end, then kills it."""
        if self.ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()


class Pool:
    """`workers` processes for one job. They start at once, in the background, and keep what they have loaded."""

    def __init__(self, name: str, job: Job, workers: int, timeout_s: float):
        self.name = name
        self.size = workers
        self._job = job
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._workers = [_Worker(job) for _ in range(workers)]

    def run(self, requests: Sequence[Any]) -> list[Reply]:
        """The reply to each request, in their order. RunError when a worker cannot even start."""
        with self._lock:
            assert self._workers, "the pool is closed"
            try:
                return self._run(requests)
            except BaseException:  # told to stop, perhaps: no later call may find a reply to this one
                for worker in [worker for worker in self._workers if worker.task is not None or not worker.ready]:
                    self._replace(worker)
                raise

    def _run(self, requests: Sequence[Any]) -> list[Reply]:
        replies: dict[int, Reply] = {}
        waiting = deque(range(len(requests)))
        while len(replies) < len(requests):
            for worker in list(self._workers):
                if worker.ready and worker.task is None and waiting:
                    self._assign(worker, waiting, requests)
            busy = [worker for worker in self._workers if worker.task is not None or not worker.ready]
            for worker in self._wait(busy):
                task = worker.task
                reply = self._collect(worker)
                if task is not None and reply is not None:
                    replies[task] = reply
        return [replies[index] for index in range(len(requests))]

    def close(self) -> None:
        """Ends all workers; may be called twice."""
        with self._lock:
            for worker in self._workers:
                worker.hang_up()
            deadline = time.monotonic() + CLOSE_S
            for worker in self._workers:
                worker.wait(deadline)
            self._workers.clear()

    def _assign(self, worker: _Worker, waiting: deque[int], requests: Sequence[Any]) -> None:
        worker.task = waiting.popleft()
        worker.deadline = time.monotonic() + self._timeout_s
        try:
            worker.send(requests[worker.task])
        except OSError:  # it died while it was idle, which is not this request's fault
            waiting.appendleft(worker.task)
            self._replace(worker)

    def _wait(self, busy: list[_Worker]) -> list[_Worker]:
        """Workers that have replied, died or run out of time; none where nothing happened for a while.

        Raises Interrupted once the run was told to stop.
        """
        stop.check()
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker, selectors.EVENT_READ)
            nearest = min(worker.deadline for worker in busy)
            events = selector.select(min(LOOK_S, max(0.0, nearest - time.monotonic())))
        ready = {id(key.fileobj) for key, _ in events}
        now = time.monotonic()
        return [worker for worker in busy if id(worker) in ready or worker.deadline <= now]

    def _collect(self, worker: _Worker) -> Reply | None:
        """The reply of a worker that is due; a dead or late one is replaced. None: it has only just started."""
        late = worker.deadline <= time.monotonic()
        try:
            if late and not _readable(worker):
                raise TimeoutError
            reply = worker.receive()
        except TimeoutError:
            return self._lost(worker, Failure("timeout", f"no result within {self._timeout_s:g} s"))
        except (OSError, EOFError, ValueError):
            return self._lost(worker, None)
        if not worker.ready:
            if "error" in reply:
                self._give_up(f"it cannot be loaded: {reply['error']}")
            worker.ready = True
            return None
        worker.task = None
        if "values" in reply:
            return list(reply["values"])
        kind: Literal["contract", "error"] = "contract" if "contract" in reply else "error"
        return Failure(kind, str(reply.get(kind)))

    def _lost(self, worker: _Worker, failure: Failure | None) -> Failure:
        started = worker.ready
        code = self._replace(worker) if started else worker.kill()
        if not started:
            what = f"took longer than {START_S:g} s" if failure else f"ended with code {code}"
            self._give_up(f"its process {what} while it started")
        return failure or Failure("died", f"its process ended with code {code}")

    def _replace(self, worker: _Worker) -> int:
        code = worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self._job)
        return code

    def _give_up(self, reason: str) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        raise RunError(f"reward term {self.name}: {reason}")


def _readable(worker: _Worker) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(worker, selectors.EVENT_READ)
        return bool(selector.select(0))
