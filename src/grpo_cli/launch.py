"""Starts the workers of a run, watches them, and answers with one exit code; nobody stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, RunError, signal_exit_code
from grpo_cli.files.redact import redact
from grpo_cli.files.rundir import RunDir
from grpo_cli.process import network
from grpo_cli.process.agent import FAILURES, LAST_WORDS, PARENT_PID
from grpo_cli.process.rankfile import ENV, Exit, RankFiles, is_running
from grpo_cli.process.signals import SAME_REQUEST_S, to_handle
from grpo_cli.process.watchdog import Watchdog
from grpo_cli.terminal.output import say

_PREFIX = "grpo-ranks-"
_POLL_S = 0.1
_ROOM_BYTES = 2**18
_LAST_WORDS_S = 2.0
"""How long the other ranks may still speak after one has failed."""


MEETING_S = 600
"""How long a node waits for the others; they start when their machines are ready."""

WORKER = "grpo_cli.worker"


def launch(cfg: Mapping[str, Any], run_dir: str | Path, worker: str = WORKER) -> int:
    """Run the workers of the resolved config `cfg` (a plain dict) in `run_dir`; returns the exit code of design.md.

    Writes config.yaml and run.json, starts `trainer.nproc_per_node` workers on this node through torch's elastic
    launcher, passes SIGTERM, SIGINT and SIGHUP on once (a second one kills), ends the run when a rank dies or stands
    still, and returns only when every process that it started is gone. Call it in the main thread. Raises ConfigError
    where the directory belongs to a live run, cannot be written, or where a value of the config holds a secret.
    `worker` is the module that each rank runs, with the run directory as its argument.
    """
    home = RunDir.create(run_dir)
    trainer = cfg["trainer"]
    owns = _take(home, nnodes=trainer["nnodes"])
    try:
        if owns:
            home.write_config(cfg)
            home.begin(seed=cfg["run"]["seed"], steps=trainer["steps"])
        code, reason = _run(home, cfg, worker)
        if owns:
            try:
                home.end(code, reason)
            except RunError as error:
                say(f"error: {error}")
        if code != EXIT_OK and reason:
            kind = "error" if code in (EXIT_FAILED, EXIT_USAGE) else "stopped"
            say(redact(reason if reason.startswith("error: ") else f"{kind}: {reason}"))
        return code
    finally:
        home.unlock()


def _take(home: RunDir, nnodes: int) -> bool:
    """Own the directory. On several nodes that share it, the first parent does and the others only start workers."""
    try:
        home.lock()
    except ConfigError:
        owner = home.owner() or {}
        if nnodes > 1 and owner.get("host") != os.uname().nodename:
            return False
        raise
    return True


def command(cfg: Mapping[str, Any], run_dir: Path, worker: str = WORKER) -> list[str]:
    """The command line of the launcher: torch.distributed.run's arguments, then the worker."""
    trainer = cfg["trainer"]
    meeting = ["--standalone", "--local-addr=127.0.0.1"] if trainer["nnodes"] == 1 else _meeting(cfg)
    return [
        *(sys.executable, "-P", "-m", "grpo_cli.process.agent"),
        *(f"--nnodes={trainer['nnodes']}", f"--nproc-per-node={trainer['nproc_per_node']}", *meeting),
        *("--max-restarts=0", "--signals-to-handle=SIGQUIT", "-m", worker, str(run_dir)),
    ]


def _meeting(cfg: Mapping[str, Any]) -> list[str]:
    """Where and how this node meets the others. The launcher would ask a name server about this machine."""
    endpoint = cfg["trainer"]["rdzv_endpoint"]
    host, port = network.host_and_port(endpoint)
    name = hashlib.sha256(f"{cfg['run']['name']} {endpoint}".encode()).hexdigest()[:12]
    waits = f"join_timeout={MEETING_S},read_timeout={MEETING_S}"
    return [
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id=grpo-{name}"),
        f"--local-addr={network.address_towards(host, port)}",
        f"--rdzv-conf=is_host={int(network.can_listen(host, port))},{waits}",
    ]


def environment(cfg: Mapping[str, Any], ranks_dir: Path) -> dict[str, str]:
    """The workers' environment: what the user set always wins."""
    trainer = cfg["trainer"]
    threads = max(1, len(os.sched_getaffinity(0)) // trainer["nproc_per_node"])
    # A file of the user's that is called like a module, in the directory where the command is typed, is not imported.
    env = {
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    # Threads that spin while they wait starve those that work, as soon as anything else wants a core.
    env["GOMP_SPINCOUNT"] = "2000"
    # gloo, too, would look up the name of this machine. One node has no reason to listen to the network.
    address = network.address_towards(*network.host_and_port(trainer["rdzv_endpoint"])) if trainer["nnodes"] > 1 else ""
    if interface := network.interface_of(address) if address else "lo":
        env["GLOO_SOCKET_IFNAME"] = interface
    return {**env, **os.environ, ENV: str(ranks_dir), PARENT_PID: str(os.getpid())}


def _run(home: RunDir, cfg: Mapping[str, Any], worker: str) -> tuple[int, str | None]:
    """Start, watch and reap; (exit code, sentence for run.json)."""
    with _ranks_dir() as ranks_dir, _signals() as got, _subreaper() as reap:
        agent = subprocess.Popen(
            command(cfg, home.path, worker),
            env=environment(cfg, ranks_dir),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            watch = _Watch(agent, RankFiles(ranks_dir), cfg["trainer"], got)
            return watch.until_end()
        finally:
            reap(agent, RankFiles(ranks_dir))
            with contextlib.suppress(OSError):
                if sys.stdout.isatty():
                    print("\x1b[?25h", end="", flush=True)  # a killed live display leaves the cursor hidden


@contextlib.contextmanager
def _ranks_dir() -> Iterator[Path]:
    """A private directory for process/rankfile.py, in memory where that can be; those of killed parents go too."""
    place = _with_room("/dev/shm", tempfile.gettempdir())
    for old in place.glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError, ValueError), _locked(old):
            if not is_running(int(old.name.removeprefix(_PREFIX).partition("-")[0])):
                shutil.rmtree(old, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
    try:
        with _locked(made):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _with_room(*places: str) -> Path:
    """The first directory that takes what the ranks will write; the last where none does."""
    for place in places:
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=place, prefix=".grpo-probe-") as probe:
            probe.write(bytes(_ROOM_BYTES))
            probe.flush()
            return Path(place)
    return Path(places[-1])


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a directory; OSError where another process does (its number alone may mean another one in a container)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


class _Watch:
    """The parent's loop over one set of workers."""

    def __init__(
        self, agent: subprocess.Popen, files: RankFiles, trainer: Mapping[str, Any], got: list[tuple[int, float]]
    ):
        self._agent = agent
        self._files = files
        self._ranks = trainer["nproc_per_node"]
        self._nodes, self._endpoint = trainer["nnodes"], trainer["rdzv_endpoint"]
        self._watchdog = Watchdog(files, trainer["step_timeout_s"], trainer["nnodes"])
        self._got = got
        self._told: set[int] = set()

    def until_end(self) -> tuple[int, str | None]:
        looked = time.monotonic()
        while self._agent.poll() is None:
            now = time.monotonic()
            if self._got and not self._files.pids():
                return self._before_the_start()
            second = self._second_signal()
            if second:
                name = signal.Signals(second).name
                return signal_exit_code(
                    second
                ), f"Ended at once by a second {name}; complete checkpoints are untouched."
            self._pass_on()
            failed = self._first_failure()
            if failed:
                return failed
            if now - looked > 10 * _POLL_S:
                looked = now
                hung = self._watchdog.look(now)
                if hung:
                    return EXIT_FAILED, hung
            time.sleep(_POLL_S)
        return self._first_failure() or self._agreed_end()

    def _second_signal(self) -> int:
        """The signal that came as a second request, 0 while there is none."""
        later = [signum for signum, at in self._got if at - self._got[0][1] > SAME_REQUEST_S]
        return later[0] if later else 0

    def _pass_on(self) -> None:
        """Tell every rank, once, that the run is to stop: because we were told, or because one rank was."""
        asked = [signum for signum, _ in self._got] or self._files.stops()
        if not asked:
            return
        pids = self._files.pids()
        for rank in sorted(set(pids) - self._told):
            self._told.add(rank)
            with contextlib.suppress(ProcessLookupError):
                if is_running(pids[rank]):
                    os.kill(pids[rank], asked[0])

    def _first_failure(self) -> tuple[int, str | None] | None:
        """Exit code and reason once a rank has failed or died; the one that did so first tells."""
        if not self._failing() and not self._dead():
            return None
        until = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < until and len(self._files.exits()) + len(self._dead()) < self._ranks:
            time.sleep(_POLL_S)
        dead = self._dead()
        if self._got and not self._failing():
            return self._before_the_start()
        if dead:
            return EXIT_FAILED, f"Rank {dead[0]} died {self._cause(dead[0])}."
        first = min(self._failing().values(), key=lambda end: end.at)
        return first.code, first.reason

    def _failing(self) -> dict[int, Exit]:
        return {rank: end for rank, end in self._files.exits().items() if end.code in (EXIT_FAILED, EXIT_USAGE)}

    def _dead(self) -> list[int]:
        """Ranks that are gone without a last word."""
        return [r for r, pid in self._files.pids().items() if not is_running(pid) and r not in self._files.exits()]

    def _cause(self, rank: int) -> str:
        kill_groups(self._files.pids().values())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(timeout=5)  # it knows how its children ended, and writes it down at its own end
        with contextlib.suppress(OSError, ValueError):
            code = json.loads((self._files.dir / FAILURES).read_text()).get(str(rank))
            if isinstance(code, int) and code < 0:
                hint = " (the kernel does that when memory runs out)" if -code == signal.SIGKILL else ""
                return f"of {signal.Signals(-code).name}{hint}"
        return "without a word: killed, perhaps because memory ran out"

    def _before_the_start(self) -> tuple[int, str]:
        return signal_exit_code(self._got[0][0]), "Stopped before the first step; nothing was saved."

    def _agreed_end(self) -> tuple[int, str | None]:
        """All ranks ended in order: their common exit code; without their words, what the launcher says."""
        exits = self._files.exits()
        if exits and len(exits) == self._ranks:
            last = max(exits.values(), key=lambda end: end.code)
            return last.code, last.reason
        if self._got:
            return self._before_the_start()
        if words := self._launchers_words():
            return EXIT_FAILED, words
        if self._agent.returncode == EXIT_OK and not self._files.pids():
            return EXIT_FAILED, "The workers ended without a word."
        return EXIT_FAILED, "A worker ended before it could say why; its own words are above."

    def _launchers_words(self) -> str | None:
        """What torch's launcher ended with where it lost, or never met, those of the other nodes."""
        try:
            error = (self._files.dir / LAST_WORDS).read_text()
        except OSError:
            return None
        if self._files.pids():
            return f"Another node is gone: {error}"
        return (
            f"Not all of trainer.nnodes={self._nodes} nodes met at trainer.rdzv_endpoint={self._endpoint} within "
            f"{MEETING_S} seconds: {error} Start the same command on each; the endpoint is an address of the first."
        )


@contextlib.contextmanager
def _signals() -> Iterator[list[tuple[int, float]]]:
    """Collect (signal, monotonic time) instead of dying of them; what was there before comes back afterwards."""
    got: list[tuple[int, float]] = []
    before: dict[int, Any] = {}
    for signum in to_handle():
        with contextlib.suppress(ValueError):  # not the main thread: the caller deals with signals
            before[signum] = signal.signal(signum, lambda n, _: got.append((n, time.monotonic())))
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _subreaper() -> Iterator[Callable[[subprocess.Popen, RankFiles], None]]:
    """Orphans of the workers become children of this process, so that they can be found and ended; yields that."""
    mine = set(_children())
    prctl: Callable[..., int] = getattr(ctypes.CDLL(None), "prctl", lambda *_: -1)
    prctl(36, 1, 0, 0, 0)  # 36 = PR_SET_CHILD_SUBREAPER

    def reap(agent: subprocess.Popen, files: RankFiles) -> None:
        if agent.poll() is None:
            kill_groups([agent.pid])
            agent.wait()
        kill_groups(files.pids().values())
        while strays := [pid for pid in _children() if pid not in mine]:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    try:
        yield reap
    finally:
        prctl(36, 0, 0, 0, 0)


def kill_groups(leaders: Iterable[int]) -> None:
    """Kill the process groups of these processes; agent and workers each lead a session of their own."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if leader > 0:
                os.killpg(leader, signal.SIGKILL)


def _children() -> list[int]:
    """Process ids of this process's children."""
    me = str(os.getpid())
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if path.read_text().rsplit(")", 1)[1].split()[1] == me:
                found.append(int(path.parent.name))
    return found
