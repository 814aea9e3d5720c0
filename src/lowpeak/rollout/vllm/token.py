"""The token that a server may demand, on every route but `/health`.

vLLM's own `--api-key` guards `/v1`, `/v2` and `/inference` alone (0.32, entrypoints/serve/middleware/authenticate.py): whoever
reaches the port could replace the weights through `/collective_rpc`. It is an ASGI middleware for vLLM's `--middleware`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lowpeak.config.vllm import SERVER_TOKEN

TOKEN = SERVER_TOKEN
_OPEN = ("/health",)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenMiddleware:
    """Answers 401 to a request whose `Authorization` is not `Bearer <LOWPEAK_SERVER_TOKEN>`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it; a socket that is refused is closed."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in _OPEN or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "this server demands a token"}'})

    def _knows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
