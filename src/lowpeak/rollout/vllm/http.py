"""JSON over HTTP to one server, by the standard library: a connection for each request, and a limit on the whole of it.

Connections are not kept: a server closes idle ones at moments of its own, and a request that meets that moment cannot be told
from one that a dying server dropped.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lowpeak.config.vllm import SERVER_TOKEN
from lowpeak.errors import ArgumentError, EngineError, LostEngineError
from lowpeak.rollout.vllm.token import find_token

MAX_CONNECTIONS = 512
_CONNECT_SECONDS = 10.0
_GONE = {503: "is not answering now (503)"}
_UNSURE = (500, 502, 504)  # a dead engine, or one that failed at this request alone
Result = TypeVar("Result")


class NoRouteError(EngineError):
    """A server does not have what was asked of it, or was not started with it."""


class Http:
    """A server's address, the token it demands (None: the one saved on this host, if any), and requests to it.

    Raises LostEngineError where the server is gone, broken or too slow, EngineError with its own sentence where it refuses.
    """

    def __init__(self, base_url: str, token: str | None = None) -> None:
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError(f"{base_url!r} is no address of a server; write http://host:port.")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._parts = parts
        self._token = token

    def get(self, path: str, timeout: float | None) -> Any:
        """What the server answers, as JSON; None where it answers nothing."""
        return self.send("GET", path, None, deadline(timeout))

    def post(self, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> Any:
        """The same with a body."""
        return self.send("POST", path, body, deadline(timeout))

    def send(self, verb: str, path: str, body: Any, until: float | None, open_: Connections | None = None) -> Any:
        """One request; its connection is known to `open_` while it lasts."""
        status, text = self.exchange(verb, path, body, until, open_)
        if status != 200:
            raise self._refusal(path, status, text)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise EngineError(
                f"the server at {self.url} answered {path} with something that is no JSON ({text[:80]!r}): is it vLLM?"
            ) from None

    def exchange(
        self, verb: str, path: str, body: Any, until: float | None, open_: Connections | None = None
    ) -> tuple[int, str]:
        """Status and text, whatever they are; LostEngineError where none came in time."""
        connection, sock = self._connect(until)
        try:
            with (open_ or Connections()).holding(sock):
                _limit(sock, until)
                data = None if body is None else json.dumps(body).encode()
                connection.request(verb, self._parts.path.rstrip("/") + path, data, self._headers())
                response = connection.getresponse()
                return response.status, _text(sock, response, until)
        except TimeoutError:
            raise LostEngineError(f"the server at {self.url} did not answer {path} in time.") from None
        except (OSError, HTTPException) as error:
            raise LostEngineError(f"the server at {self.url} was lost at {path}: {_words(error)}.") from error
        finally:
            connection.close()
            sock.close()

    def is_healthy(self) -> bool:
        """Whether its engine lives; a hung one still says so."""
        with suppress(EngineError):
            return self.exchange("GET", "/health", None, deadline(5.0))[0] == 200
        return False

    def _headers(self) -> dict[str, str]:
        # A server that was started again has saved another token.
        token = self._token or find_token(self._parts.hostname, self._parts.port)
        shown = {"Authorization": f"Bearer {token}"} if token else {}
        return {"Connection": "close", "Content-Type": "application/json", **shown}

    def _connect(self, until: float | None) -> tuple[HTTPConnection, socket.socket]:
        """A connection, and its socket, which http.client lets go of when the answer begins."""
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        seconds = _CONNECT_SECONDS if until is None else min(_CONNECT_SECONDS, until - time.monotonic())
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=max(0.001, seconds))
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise LostEngineError(f"no server answers at {self.url}: {_words(error)}.") from error
        _keep_alive(connection.sock)
        return connection, connection.sock

    def _refusal(self, path: str, status: int, text: str) -> EngineError:
        """The error that a status stands for, with the server's words."""
        said = f"the server at {self.url}"
        if status == 401:
            return EngineError(
                f"{said} demands a token that it did not get: set vllm_server_token, or {SERVER_TOKEN} in the environment, to the "
                "one that it was started with."
            )
        if status in _GONE or (status in _UNSURE and not self.is_healthy()):
            return LostEngineError(f"{said} {_GONE.get(status, f'has lost its engine ({status})')}: {_sentence(text)}")
        if status in (403, 404, 405):
            return NoRouteError(
                f"{said} has no {path} ({status}: {_sentence(text)}): start it with `lowpeak serve`, which turns it on."
            )
        return EngineError(f"{said} refused {path} ({status}): {_sentence(text)}")


class Connections:
    """The connections of requests that are under way, so that they can be given up together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._given_up = False

    @contextmanager
    def holding(self, sock: socket.socket) -> Iterator[None]:
        """A context in which the socket is among them; ended at once where all were given up."""
        with self._lock:
            self._open.add(sock)
            if self._given_up:
                _shut(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)

    def give_up(self) -> None:
        """End them all: whoever waits for an answer gets an error, and a server that sees the client go aborts the request."""
        with self._lock:
            self._given_up = True
            for sock in self._open:
                _shut(sock)


def gather(calls: Sequence[Callable[[Connections], Result]]) -> tuple[list[Result | None], BaseException | None]:
    """What the calls return, made at once on up to MAX_CONNECTIONS threads, and the error of the first that failed.

    After a failure, and after Ctrl-C, the others are given up; those that had returned by then stand in the list.
    """
    open_ = Connections()
    pool = ThreadPoolExecutor(max_workers=max(1, min(MAX_CONNECTIONS, len(calls))), thread_name_prefix="lowpeak-http")
    futures: list[Future[Result]] = [pool.submit(call, open_) for call in calls]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future.exception() for future in futures if future in done and future.exception()), None)
    finally:
        finished = [future.done() and not future.cancelled() for future in futures]
        open_.give_up()
        pool.shutdown(cancel_futures=True)
    returned = [
        future.result() if was_done and future.exception() is None else None
        for future, was_done in zip(futures, finished, strict=True)
    ]
    return returned, failed


def deadline(seconds: float | None) -> float | None:
    """The moment on the monotonic clock that is `seconds` from now."""
    return None if seconds is None else time.monotonic() + seconds


def _limit(sock: socket.socket, until: float | None) -> None:
    left = None if until is None else until - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _text(sock: socket.socket, response: HTTPResponse, until: float | None) -> str:
    """The body, with the limit on all of it: a socket's own limit begins anew with each byte."""
    parts = []
    while part := response.read1(1 << 16):
        parts.append(part)
        _limit(sock, until)
    if response.length:
        raise HTTPException(f"{response.length} bytes of the answer are missing")
    return b"".join(parts).decode("utf-8", errors="replace")


def _keep_alive(sock: socket.socket) -> None:
    """Notice within two minutes that the other host is gone, where no limit was asked for."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _sentence(text: str) -> str:
    """What the server says was wrong: vLLM's own field, else the beginning of its answer."""
    try:
        error = json.loads(text).get("error", text)
        said = error.get("message", text) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = text
    return " ".join(str(said).split())[:500] or "it gave no reason"
