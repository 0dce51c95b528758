"""Talks to vLLM servers: many requests at a time, repeated when a connection drops, given up when a server is dead."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeout
from typing import Any, TypeVar

import httpx
import psutil
import tenacity

from grpo_cli.errors import RunError
from grpo_cli.process.signals import Interrupted, stop
from grpo_cli.rollout.server_process import ServerProcess, authorization

DEAD_AFTER_S = 20.0
"""A server that has not answered /health for so long is dead; with the time of noticing, less than 30 s."""

_HEALTH_EVERY_S = 1.0
_CONNECT_TIMEOUT_S = 10.0
_CONNECTIONS = 1024
"""Completions that are asked for at a time; the others wait here, not in the connections."""

_OTHER_FILES = 512
"""Files that may be opened beside those connections: control requests, checkpoints, data, reward processes."""

_FEWEST_CONNECTIONS = 16
_UPDATE_TIMEOUT_S = 600.0
_SCORING_TIMEOUT_S = 1800.0

_GENERATE = "/inference/v1/generate"

T = TypeVar("T")


class Client:
    """Requests to one or several servers of the same model, on an event loop in a thread of its own.

    Completions are asked of the servers in turn; whatever changes their state goes to all of them, on connections of
    its own: a server that is paused keeps those of generation busy until a control request has reached it.
    """

    def __init__(self, urls: list[str], key: str | None, own: list[ServerProcess]):
        """`own`: the processes behind `urls` where they are this process's children, else empty."""
        self.urls, self._key, self._own = urls, key, own
        self._next = self._answered = 0
        self._dead: RunError | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        self.wait(self._open(room_for_connections()))
        self._watch: Future[None] = self.submit(self._watch_health())

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the client's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T], leave: bool = False) -> T:
        """The result of `work`. With `leave` it is given up, with Interrupted, when the run is asked to stop.

        Completions that arrive meanwhile are progress, which the watchdog hears of.
        """
        future = self.submit(work)
        answered = self._answered
        while True:
            try:
                return future.result(timeout=0.5)
            except WaitTimeout:
                if future.done():  # at this very moment, or with a time-out of its own
                    return future.result()
                if answered != self._answered:
                    answered = self._answered
                    stop.rank_file.alive()
                if leave and stop.signum:
                    future.cancel()
                    raise Interrupted from None

    def close(self) -> None:
        """Drop all connections; requests that still run end with an error."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(WaitTimeout):
            self.submit(self._close()).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()

    # ------------------------------------------------------------------------------------------------ requests

    async def generate(self, requests: list[dict[str, Any]]) -> list[Any]:
        """The answers to `{"token_ids", "sampling_params"}` requests, in their order.

        Raises RunError as soon as one of them cannot be had.
        """

        async def one(request: dict[str, Any]) -> Any:
            self._next += 1
            url = self.urls[self._next % len(self.urls)]
            async with self._places:
                answer = await self.request("POST", f"{url}{_GENERATE}", None, via=self._generation, json=request)
            self._answered += 1
            return answer

        return await _together(one(request) for request in requests)

    async def ask(self, url: str, requests: list[dict[str, Any]]) -> list[Any]:
        """As `generate`, of one server, past all completions that are waited for: what a sync check asks."""
        return await _together(
            self.request("POST", f"{url}{_GENERATE}", _SCORING_TIMEOUT_S, json=request) for request in requests
        )

    async def everywhere(self, method: str, path: str, **arguments: Any) -> list[Any]:
        """The answers of all servers to one request."""
        timeout = arguments.pop("timeout", _UPDATE_TIMEOUT_S)
        return await _together(self.request(method, f"{url}{path}", timeout, **arguments) for url in self.urls)

    async def each(self, path: str, bodies: list[dict[str, Any]], **arguments: Any) -> None:
        """POST to every server a body of its own."""
        pairs = zip(self.urls, bodies, strict=True)
        await _together(
            self.request("POST", f"{url}{path}", _UPDATE_TIMEOUT_S, json=body, **arguments) for url, body in pairs
        )

    async def call(self, name: str, **arguments: str) -> list[Any]:
        """The answers of all workers of all servers to a method of theirs."""
        body = {"method": name, "kwargs": arguments}
        answers = await self.everywhere("POST", "/collective_rpc", json=body)
        return [result for answer in answers if answer for result in answer["results"]]

    async def request(
        self,
        method: str,
        url: str,
        timeout: float | None,
        via: httpx.AsyncClient | None = None,
        once: bool = False,
        **arguments: Any,
    ) -> Any:
        """JSON (or text) that the server answers; `via` None is a control request.

        A dropped connection is tried again with growing pauses: the same seed gives the same tokens, and weights that
        arrive twice are the same weights. `once` is for what a server must not be told twice: only a connection that
        was never made is tried again. Raises RunError when the server is dead or refuses.
        """
        again = (httpx.ConnectError, httpx.ConnectTimeout) if once else (httpx.TransportError, _Busy)
        retry = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(again),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
            stop=tenacity.stop_after_delay(DEAD_AFTER_S),
            reraise=True,
        )
        limits = httpx.Timeout(timeout, connect=_CONNECT_TIMEOUT_S, pool=None)
        try:
            async for attempt in retry:
                with attempt:
                    self.check()
                    return await self._once(via or self._control, method, url, timeout=limits, **arguments)
        except (httpx.TransportError, _Busy) as error:
            self.check()
            raise RunError(f"The vLLM server does not answer {method} {url}: {_told(error)}") from error

    async def _once(self, http: httpx.AsyncClient, method: str, url: str, **arguments: Any) -> Any:
        answering = asyncio.ensure_future(http.request(method, url, **arguments))
        dying = asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait({answering, dying}, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            response = await answering
        except httpx.ConnectError as error:
            if _out_of_files(error):
                raise RunError(f"No file can be opened for {method} {url}: raise `ulimit -n`. {error}") from error
            raise
        finally:
            answering.cancel()
            dying.cancel()
        if response.status_code in (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS):
            raise _Busy(response.text[:500])
        if response.is_error:
            raise RunError(f"The vLLM server refuses {method} {url} ({response.status_code}): {response.text[:2000]}")
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    # ------------------------------------------------------------------------------------------------ health

    def check(self) -> None:
        """Raise RunError when a server is known to be dead."""
        if self._dead is not None:
            raise self._dead

    async def _watch_health(self) -> None:
        """Ask every server how it is, for as long as the client lives; one that is dead ends all requests."""
        seen = dict.fromkeys(self.urls, time.monotonic())
        while self._dead is None:
            await asyncio.sleep(_HEALTH_EVERY_S)
            try:
                for process in self._own:
                    process.check()
                await asyncio.gather(*(self._look(url, seen) for url in self.urls))
            except RunError as error:
                self._dead = error
                self._death.set()

    async def _look(self, url: str, seen: dict[str, float]) -> None:
        told = "no answer"
        try:
            response = await self._control.get(f"{url}/health", timeout=5.0)
            told = f"status {response.status_code}"
            process = next((process for process in self._own if process.url == url), None)
            if response.is_success and not (process is not None and process.stopped()):
                seen[url] = time.monotonic()
        except httpx.TransportError as error:
            told = _told(error)
        silent = time.monotonic() - seen[url]
        if silent > DEAD_AFTER_S:
            process = next((process for process in self._own if process.url == url), None)
            state = " A process of it is stopped (SIGSTOP)." if process is not None and process.stopped() else ""
            raise RunError(f"The vLLM server at {url} has not been well for {silent:.0f} s ({told}).{state}")

    async def _open(self, connections: int) -> None:
        self._death = asyncio.Event()
        self._places = asyncio.Semaphore(connections)
        self._generation = self._connections(max_connections=connections, max_keepalive_connections=64)
        # Few, without a limit to wait at, and never used twice: one that the server closes at the moment of a request
        # would leave it open whether the request came through.
        self._control = self._connections(max_connections=None, max_keepalive_connections=0)

    def _connections(self, **limits: int | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=authorization(self._key),
            limits=httpx.Limits(**limits),
            trust_env=False,  # a proxy has no business between a run and its own server
        )

    async def _close(self) -> None:
        self._watch.cancel()
        self._dead = self._dead or RunError("The connection to the vLLM server was closed.")
        self._death.set()
        with contextlib.suppress(Exception):
            await self._control.aclose()
            await self._generation.aclose()


class _Busy(Exception):
    """The server asks to come back later."""


def room_for_connections() -> int:
    """How many connections generation may open: `_CONNECTIONS`, or what the limit of open files leaves.

    The soft limit is raised for them, as far as the hard one allows.
    """
    wanted = psutil.Process().num_fds() + _OTHER_FILES + _CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _CONNECTIONS
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # forbidden; then the soft limit it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return min(_CONNECTIONS, max(_CONNECTIONS - (wanted - soft), _FEWEST_CONNECTIONS))


async def _together(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; after an error, or a cancellation, the others are of no use and are given up."""
    tasks = [asyncio.ensure_future(work) for work in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _out_of_files(error: BaseException) -> bool:
    """Whether it began with this process having too many files open, and says nothing about the server."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
