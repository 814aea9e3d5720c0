"""HTTP routes by which programs ask for the turns of their conversations, on a free port of 127.0.0.1.

Each conversation has a token of its own, which a client sends as its API key: a program reaches its own conversation and nothing
else, until that has ended. The server has a thread of its own, so that a program may block the thread of the others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from lowpeak.errors import EngineError, first_line, require_package
from lowpeak.rewards import BackgroundLoop

logger = logging.getLogger(__name__)

MODEL = "policy"
_MODELS = "/v1/models"
_MAX_BODY_BYTES = 8 << 20  # of a request's body
_BODY_SECONDS = 30.0
_MAX_CONNECTIONS = 4096
_START_SECONDS = 30.0
# The engine's thread computes all the time: with Python's 5 ms every request would wait for it several times.
_SWITCH_SECONDS = 0.0005

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """Where a program asks for its conversation's turns: arguments of an OpenAI client, and the model's name in requests.

    A program that asks by tokens has `tokenizer`, which all programs share, `template`, the arguments of its chat template, and
    `end_ids`, which end a turn.
    """

    base_url: str
    api_key: str
    model: str = MODEL
    tokenizer: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)
    end_ids: Collection[int] = ()


# The code of OpenAI's error where a conversation has no tokens or turns left.
OUT_OF_ROOM = "context_length_exceeded"


class RefusedError(Exception):
    """A request that is not answered with a turn: the HTTP status and the reason."""

    def __init__(self, status: int, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.status, self.code = status, code


class PendingTurn(Protocol):
    """A turn that was asked for; `deliver` adds it to the conversation and returns the response's body."""

    answer: Future[Any]

    def cancel(self) -> None: ...

    def deliver(self) -> Mapping[str, Any]: ...


class RoutedConversation(Protocol):
    """A conversation behind the routes; its methods raise RefusedError, and are called on the server's thread.

    `ask` gets the path and the body of a request.
    """

    @property
    def max_model_len(self) -> int: ...

    def ask(self, path: str, body: Mapping[str, Any]) -> PendingTurn: ...

    def note_refusal(self, reason: str) -> None: ...

    def note_disconnect(self) -> None: ...


class Routes:
    """The server of the routes, started with the first conversation."""

    paths = ("/inference/v1/generate", "/v1/inference/v1/generate", "/v1/chat/completions")

    def __init__(self) -> None:
        self._conversations: dict[str, RoutedConversation] = {}
        self._loop = BackgroundLoop()
        self._server: Any = None
        self._stopped: Future[None] | None = None
        self._port = 0
        self._switch_seconds = 0.0  # Python's own, while the server runs

    def open(self, conversation: RoutedConversation) -> Endpoint:
        """Return the endpoint of a conversation."""
        if self._server is None:
            self._start()
        token = secrets.token_urlsafe(24)
        self._conversations[token] = conversation
        return Endpoint(f"http://127.0.0.1:{self._port}/v1", token)

    def end(self, endpoint: Endpoint) -> None:
        """Answer no further request of a conversation."""
        self._conversations.pop(endpoint.api_key, None)

    def close(self) -> None:
        """End the server and its connections."""
        if self._server is not None and self._stopped is not None:
            self._conversations.clear()
            self._server.should_exit = self._server.force_exit = True
            with suppress(TimeoutError):
                self._stopped.result(_START_SECONDS)
            self._server = None
            sys.setswitchinterval(self._switch_seconds)

    def _start(self) -> None:
        require_package("uvicorn", "environments with a method run", "agents")
        import uvicorn

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        # A program's tool may take longer than the server's default patience with an idle connection.
        config = uvicorn.Config(
            self, log_config=None, log_level="critical", access_log=False, lifespan="off", loop="asyncio", http="h11",
            ws="none", timeout_keep_alive=24 * 3600, limit_concurrency=_MAX_CONNECTIONS, backlog=_MAX_CONNECTIONS,
        )  # fmt: skip
        server = uvicorn.Server(config)
        self._stopped = self._loop.submit(server.serve(sockets=[listener]))
        try:
            self._loop.run(_wait_until_started(server))
        except TimeoutError:
            raise EngineError(
                f"the routes of programs have not started on 127.0.0.1:{self._port} within {_START_SECONDS:g} seconds: check that "
                "this host lets processes listen there."
            ) from None
        self._server, self._switch_seconds = server, sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_SECONDS, self._switch_seconds))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application."""
        conversation = None
        try:
            conversation = self._conversation_of(scope)
            await _send(send, 200, await self._answer(conversation, scope, receive))
        except RefusedError as refused:
            if conversation is not None:
                conversation.note_refusal(str(refused))
            await _refuse(send, refused.status, str(refused), refused.code)
        except ConnectionError:
            assert conversation is not None, "others are refused before their clients leave"
            conversation.note_disconnect()
        except Exception as error:
            logger.exception("A program's request failed.")
            await _refuse(send, 500, first_line(error))

    def _conversation_of(self, scope: Scope) -> RoutedConversation:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = headers[0].decode("latin-1").partition(" ") if len(headers) == 1 else ("", "", "")
        conversation = self._conversations.get(token) if kind.lower() == "bearer" else None
        if conversation is None:
            raise RefusedError(401, "no conversation has this API key: it has ended, or the key is not its endpoint's.")
        return conversation

    async def _answer(self, conversation: RoutedConversation, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        path, method = scope["path"], scope["method"]
        if path == _MODELS and method == "GET":
            model = {"id": MODEL, "object": "model", "max_model_len": conversation.max_model_len}
            return {"object": "list", "data": [model]}
        if path not in self.paths:
            raise RefusedError(404, f"the routes are GET {_MODELS} and POST {', '.join(self.paths)}.")
        if method != "POST":
            raise RefusedError(405, f"{path} takes POST.")
        turn = conversation.ask(path, _parse(await _read(receive)))
        # After the body, the next message is that the client has left.
        left = asyncio.ensure_future(receive())
        answer = asyncio.wrap_future(turn.answer)
        try:
            await asyncio.wait({left, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ConnectionError
            answer.result()
            return turn.deliver()
        finally:
            left.cancel()
            if not answer.done():
                turn.cancel()


async def _wait_until_started(server: Any) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while not server.started:
            await asyncio.sleep(0.005)


async def _read(receive: Receive) -> bytes:
    """Return the body of a request that is small and arrives in time."""
    parts, size, is_complete = list[bytes](), 0, False
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while not is_complete:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionError
                size += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                # A client that still sends would not see the answer.
                if size <= _MAX_BODY_BYTES:
                    parts.append(message.get("body", b""))
    except TimeoutError:
        raise RefusedError(408, f"the body did not arrive within {_BODY_SECONDS:g} seconds.") from None
    if size > _MAX_BODY_BYTES:
        raise RefusedError(413, f"a request has at most {_MAX_BODY_BYTES} bytes.")
    return b"".join(parts)


def _parse(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RefusedError(400, "the body is no JSON object.")
    return value


async def _refuse(send: Send, status: int, reason: str, code: str = "") -> None:
    # The client of a refused request may still be sending its body.
    error = {
        "message": reason,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "code": code or status,
    }
    await _send(send, status, {"error": error}, (b"connection", b"close"))


async def _send(send: Send, status: int, content: Mapping[str, Any], *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps(content).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers)
    await send({"type": "http.response.start", "status": status, "headers": [*headers]})
    await send({"type": "http.response.body", "body": body})
