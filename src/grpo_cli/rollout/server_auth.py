"""The lock on a vLLM server: every request needs the key, not only those that vLLM itself guards.

vLLM's `--api-key` leaves the endpoints open that replace weights, run worker methods or put the engine to sleep. A
server started by hand takes this too: `GRPO_SERVER_KEY=… python -m vllm.entrypoints.openai.api_server --middleware
grpo_cli.rollout.server_auth.RequireKey …`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "GRPO_SERVER_KEY"
CLASS_PATH = "grpo_cli.rollout.server_auth.RequireKey"

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class RequireKey:
    """ASGI middleware: `Authorization: Bearer <key of the environment>`, or 401."""

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set: the server would be open to everyone on this machine.")
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan" and not self._allowed(scope):
            if scope["type"] == "http":
                await _refuse(send)
                return
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope.get("headers", []) if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _refuse(send: Any) -> None:
    body = b'{"error": "Unauthorized"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
