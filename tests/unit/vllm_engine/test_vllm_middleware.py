"""The token that a server demands, on every route but the one that says whether it lives."""

from __future__ import annotations

import asyncio

import pytest

from lowpeak.arguments.vllm import SERVER_TOKEN
from lowpeak.vllm.serving.middleware import TokenMiddleware


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setenv(SERVER_TOKEN, "sécret")

    async def app(scope, receive, send):
        await send({"type": "passed"})

    return TokenMiddleware(app)


# What a page of another site may have a browser send without asking the server first.
FROM_A_WEB_PAGE = [(b"host", b"127.0.0.1:8000"), (b"origin", b"https://example.com"), (b"content-type", b"text/plain")]


def answered(middleware, path, *authorizations, kind="http"):
    sent = []

    async def send(message):
        sent.append(message)

    headers = [
        *FROM_A_WEB_PAGE,
        *((b"authorization", each.encode(errors="surrogateescape")) for each in authorizations),
    ]
    asyncio.run(middleware({"type": kind, "method": "POST", "path": path, "headers": headers}, None, send))
    return sent


PASSED = [{"type": "passed"}]


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/pause", "/v1/completions", "/metrics", "/docs", "//health", "/health/"]
)
@pytest.mark.parametrize(
    "given", [(), ("Bearer other",), ("sécret",), ("Bearer sécret", "Bearer sécret"), ("Bearer ",), ("Bearer \udcff",)]
)
def test_without_the_token_every_route_is_refused(guarded, path, given):
    start, body = answered(guarded, path, *given)
    assert start["status"] == 401
    assert b"error" in body["body"]


def test_with_it_and_to_ask_whether_it_lives_requests_pass_and_a_socket_is_closed(guarded):
    assert answered(guarded, "/collective_rpc", "Bearer sécret") == PASSED
    assert answered(guarded, "/health") == PASSED
    assert answered(guarded, "", kind="lifespan") == PASSED
    assert answered(guarded, "/v1/realtime", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
