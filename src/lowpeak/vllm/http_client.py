"""HTTP client for one vLLM server: JSON requests with a total time limit each.

Requests run on an event loop in a background thread, so that they also work inside a notebook's loop and Ctrl-C
cancels them. Connections are not reused: a request that meets the server closing an idle connection looks like one
that a dying server dropped.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from functools import cache
from typing import Any, TypeVar

import httpx2

from lowpeak.arguments import SERVER_TOKEN
from lowpeak.errors import EngineError, LostEngineError, StoppedError, first_line
from lowpeak.vllm.serving import find_token

_MAX_CONNECTIONS = 512
_TIMEOUT = httpx2.Timeout(None, connect=10.0)  # asyncio.timeout_at bounds the whole request
_GONE = {503: "is not answering now (503)"}
_AMBIGUOUS = (500, 502, 504)  # a dead engine, or one failed request
_CHECK_SECONDS = 0.2
# Detect a lost host within two minutes, also if a request has no time limit.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)
    ),
]
Result = TypeVar("Result")


class NoRouteError(EngineError):
    """Error for a server without a route, or started without it."""


class Http:
    """HTTP access to a server: its address and token (None: the token saved on this host, if any).

    Requests raise LostEngineError if the server is gone, broken or too slow, EngineError with the server's message if
    it refuses.
    """

    def __init__(self, base_url: str, token: str | None = None) -> None:
        self._url = httpx2.URL(base_url)
        self.url = str(self._url).rstrip("/")
        self._token = token
        self._ssl = ssl.create_default_context()
        self._slots = asyncio.Semaphore(_MAX_CONNECTIONS)

    def get(self, path: str, timeout: float, stopping: Callable[[], bool] = lambda: False) -> Any:
        """Return the server's JSON, None if the response is empty; raise StoppedError once `stopping()` is true."""
        return run_on_loop(self._send("GET", path, None, deadline(timeout)), stopping)

    def post(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        return run_on_loop(self._send("POST", path, body, deadline(timeout)))

    async def generate(self, path: str, body: Mapping[str, Any], until: float | None, *, as_bytes: bool = False) -> Any:
        """Post as one of a bounded number of requests; the server aborts one that is cancelled."""
        async with self._slots:
            return await self._send("POST", path, body, until, as_bytes=as_bytes)

    def exchange(self, verb: str, path: str, body: Any, until: float | None) -> tuple[int, bytes]:
        """Return status and content of one request; no status is an error."""
        return run_on_loop(self._exchange(verb, path, body, until))

    def is_healthy(self) -> bool:
        """Return whether the server's engine is alive; a hung engine also counts as alive."""
        return run_on_loop(self._is_healthy())

    async def _is_healthy(self) -> bool:
        try:
            status, _ = await self._exchange("GET", "/health", None, deadline(5.0))
        except EngineError:
            return False
        return status == 200

    async def _send(self, verb: str, path: str, body: Any, until: float | None, *, as_bytes: bool = False) -> Any:
        status, content = await self._exchange(verb, path, body, until)
        if status == 200 and as_bytes:
            return content
        text = content.decode(errors="replace")
        if status != 200:
            raise await self._refusal(path, status, text)
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError):
            raise EngineError(
                f"the server at {self.url} answered {path} with {text[:80]!r}, which is not JSON: check that it is vLLM."
            ) from None

    async def _exchange(self, verb: str, path: str, body: Any, until: float | None) -> tuple[int, bytes]:
        # One client per request: a pool scans all of its connections whenever one changes. The explicit transport ignores the
        # environment's proxies.
        transport = httpx2.AsyncHTTPTransport(self._ssl, socket_options=_KEEP_ALIVE)
        try:
            async with (
                asyncio.timeout_at(until),
                httpx2.AsyncClient(transport=transport, timeout=_TIMEOUT, trust_env=False) as client,
            ):
                response = await client.request(verb, self.url + path, json=body, headers=self._headers())
                return response.status_code, response.content
        except TimeoutError:
            raise LostEngineError(f"the server at {self.url} did not answer {path} within the time limit.") from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise LostEngineError(f"no server answers at {self.url}: {first_line(error)}.") from error
        except httpx2.HTTPError as error:
            raise LostEngineError(f"the server at {self.url} was lost during {path}: {first_line(error)}.") from error

    def _headers(self) -> dict[str, str]:
        # Read the saved token for every request, because a restarted server has another one.
        token = self._token or find_token(self._url.host, self._url.port)
        return {"Connection": "close"} | ({"Authorization": f"Bearer {token}"} if token else {})

    async def _refusal(self, path: str, status: int, text: str) -> EngineError:
        """Return the error for an HTTP status, with the server's message."""
        server = f"the server at {self.url}"
        if status == 401:
            return EngineError(
                f"{server} requires a token: set vllm_server_token, or {SERVER_TOKEN} in the environment, to the token that it was "
                "started with."
            )
        if status in _GONE or (status in _AMBIGUOUS and not await self._is_healthy()):
            return LostEngineError(
                f"{server} {_GONE.get(status, f'has lost its engine ({status})')}: {_sentence(text)}"
            )
        if status in (403, 404, 405):
            return NoRouteError(
                f"{server} has no {path} ({status}: {_sentence(text)}): start it with `lowpeak serve`, which turns it on."
            )
        return EngineError(f"{server} refused {path} ({status}): {_sentence(text)}")


def run_on_loop(coroutine: Coroutine[Any, Any, Result], stopping: Callable[[], bool] = lambda: False) -> Result:
    """Run a coroutine on the background loop and return its result; raise StoppedError once `stopping()` is true.

    Any error during the wait, including Ctrl-C, cancels the coroutine.
    """
    future = start_on_loop(coroutine)
    try:
        while not wait([future], _CHECK_SECONDS).done:
            if stopping():
                raise StoppedError("the run was stopped while waiting for a vLLM server.")
        return future.result()
    finally:
        future.cancel()


def start_on_loop(coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Start a coroutine on the background loop and return its future, whose `cancel` cancels it."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid()))


@cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return this process's event loop; a forked child starts its own, because threads do not survive a fork."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="lowpeak-http", daemon=True).start()
    return loop


def deadline(seconds: float | None) -> float | None:
    """Return the time on the monotonic clock that is `seconds` from now."""
    return None if seconds is None else time.monotonic() + seconds


def _sentence(text: str) -> str:
    """Return the server's error message: vLLM's field, otherwise the start of the response."""
    try:
        error = json.loads(text).get("error", text)
        message = error.get("message", text) if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        message = text
    return " ".join(str(message).split())[:500] or "no reason given"
