"""ASGI middlewares for vLLM's `--middleware`, and the file with a server's token.

vLLM's `--api-key` protects only `/v1`, `/v2` and `/inference` (0.32, entrypoints/serve/middleware/authenticate.py),
so any client could replace the weights through `/collective_rpc`. The token here protects every route but `/health`;
runs on the same host read it from the file.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from lowpeak.arguments import SERVER_TOKEN
from lowpeak.errors import ArgumentError

ADAPTER_ROUTE = "/lowpeak_adapter"
_ADAPTER_PREFIX = "lowpeak-"  # of the names that `weight_sync/lora.py` chooses
_PUBLIC_ROUTES = ("/health",)
_THIS_HOST = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenMiddleware:
    """Middleware that answers 401 unless `Authorization` is `Bearer <LOWPEAK_SERVER_TOKEN>`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[SERVER_TOKEN]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in _PUBLIC_ROUTES or self._is_authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send_answer(send, 401, b'{"error": "this server demands a token"}', (b"www-authenticate", b"Bearer"))

    def _is_authorized(self, scope: Scope) -> bool:
        credentials = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(credentials) == 1 and hmac.compare_digest(credentials[0], self._expected)


@contextmanager
def saved_token(port: int, token: str) -> Iterator[Path]:
    """Save the token of the server at `port` in a file that only this user can read, during the block."""
    # Only on Unix, like vLLM.
    import fcntl

    path = _token_file(port)
    # The lock reserves the port: vLLM binds it a minute later, and another server could be started for it until then.
    with ExitStack() as files:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            file = files.enter_context(os.fdopen(descriptor, "w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, 0o600)
            file.truncate(0)
            file.write(token)
            file.flush()
        except BlockingIOError as error:
            raise ArgumentError(
                f"another lowpeak serve on this host uses port {port}: choose another --port."
            ) from error
        except OSError as error:
            raise ArgumentError(
                f"the server's token cannot be written to {path} ({error.strerror}): choose a token and set {SERVER_TOKEN} to it, "
                "for the server and for the run."
            ) from error
        files.callback(path.unlink, missing_ok=True)
        yield path


def find_token(host: str | None, port: int | None) -> str | None:
    """Return the saved token of the server at `port`; None without one or for another host."""
    if host in _THIS_HOST and port is not None:
        with suppress(OSError):
            return _token_file(port).read_text()
    return None


def _token_file(port: int) -> Path:
    # hosts may share the folder
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lowpeak" / f"{socket.gethostname()}-{port}.token"


class AdapterMiddleware:
    """Middleware that registers a pushed adapter, so that requests can name it.

    vLLM's `/v1/load_lora_adapter` would load the files again under another number: a second, unverified copy. Here
    the server only receives the number of the adapter that its workers have loaded.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ADAPTER_ROUTE:
            await self._app(scope, receive, send)
            return
        register_adapter(scope["app"].state.openai_serving_models, json.loads(await read_body(receive)))
        await send_answer(send, 200, b"{}")


def register_adapter(models: Any, adapter: Mapping[str, Any]) -> None:
    """Register `adapter` with vLLM's server, and remove those of lowpeak whose folders its workers have removed."""
    from vllm.lora.request import LoRARequest

    for name, request in list(models.lora_requests.items()):
        if name.startswith(_ADAPTER_PREFIX) and not Path(request.lora_path).exists():
            del models.lora_requests[name]
    models.lora_requests[adapter["name"]] = LoRARequest(adapter["name"], int(adapter["number"]), adapter["folder"])


async def send_answer(send: Send, status: int, content: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Send an answer: JSON, or with status 200 any bytes."""
    kind = b"application/json" if content[:1] == b"{" else b"application/octet-stream"
    start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": content})


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request."""
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)
