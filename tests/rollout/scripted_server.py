"""A small HTTP server in a thread that answers as a test says: what the client sees of a vLLM server, without one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Answer = Callable[[str, Any], Awaitable[Any]]
"""(path, JSON of the body) -> JSON of the answer, or (status, JSON); None closes the connection without an answer."""


class ScriptedServer:
    """Serves until `close`; `asked` holds (path, body) in the order in which requests came."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self.asked: list[tuple[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10.0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked if path != "/health"]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _open(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths = [int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length")]
                body = await reader.readexactly(sum(lengths))
                path = head.split()[1].partition("?")[0]
                self.asked.append((path, json.loads(body) if body else None))
                said = {} if path == "/health" else await self._answer(*self.asked[-1])
                if said is None:
                    return
                status, said = said if isinstance(said, tuple) else (200, said)
                text = json.dumps(said).encode()
                lines = f"HTTP/1.1 {status} .\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
                writer.write(lines.encode() + text)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
