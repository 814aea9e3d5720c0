"""Environments of an OpenEnv server over a client in this process; the real server is in tests/with_agents."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from lowpeak.environments.openenv import openenv_factory
from lowpeak.environments.tools import public_methods, tool_schemas
from lowpeak.errors import ArgumentError

METADATA = {"metadata": {"type": "object"}}
MOVE = {
    "description": "Move.\n\nMore of it.",
    "properties": {
        **METADATA,
        "steps": {"type": "integer", "description": "How far."},
        "name": {"type": "string", "default": "me"},
    },
}


class Client:
    """A session that ends at its second step, and answers with what it got."""

    def __init__(self, base_url):
        self.calls = [base_url]

    async def reset(self, **arguments):
        self.calls.append(arguments)
        return SimpleNamespace(observation={"text": "begin", "metadata": {}})

    async def step(self, action):
        self.calls.append(action)
        return SimpleNamespace(observation={"got": action, "at": 1}, reward=0.5, done=len(self.calls) == 4)

    async def close(self):
        self.calls.append("closed")


@pytest.fixture
def serve():
    """Serves this schema of actions at the address that it returns; None answers with an error."""
    servers = []

    def start(schema):
        class Schema(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(500 if schema is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps({"action": schema}).encode())

            def log_message(self, *arguments):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Schema))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_an_action_of_one_text_is_the_policys_turn(serve):
    url = serve({"properties": {**METADATA, "message": {"type": "string"}}})

    async def converse():
        environment = openenv_factory(url, Client)()
        prompt = [{"role": "user", "content": "Play."}]
        assert await environment.reset(seed=3, answer="4", prompt=prompt) == "\nbegin"
        replies = [await environment.respond(text) for text in ("a", "b")]
        assert await environment.get_turn_reward() == 1.0  # of both steps
        await environment.close()
        return replies, environment._client.calls, public_methods(environment)

    replies, seen, tools = asyncio.run(converse())
    assert replies == [json.dumps({"got": {"message": "a"}, "at": 1}), None]
    assert seen == [url, {"seed": 3, "answer": "4"}, {"message": "a"}, {"message": "b"}, "closed"]
    assert tools == {}


def test_any_other_action_is_a_tool_with_its_schema(serve):
    environment = openenv_factory(serve(MOVE), Client)()
    ((schema,), tools) = tool_schemas(public_methods(environment)), public_methods(environment)
    parameters = schema["function"]["parameters"]
    assert (schema["function"]["name"], schema["function"]["description"]) == ("step", "Move.")
    assert parameters["properties"]["steps"] == {"type": "integer", "description": "How far."}
    assert parameters["required"] == ["steps"]

    async def act():
        return [await asyncio.gather(*(tools["step"](steps=i) for i in (3, 4))), await environment.get_turn_reward()]

    texts, reward = asyncio.run(act())
    assert (texts[0], reward) == (json.dumps({"got": {"steps": 3}, "at": 1}), 1.0)
    assert asyncio.run(environment.get_turn_reward()) is None  # no step since


def test_an_episode_that_is_over_takes_no_step(serve):
    environment = openenv_factory(serve(MOVE), Client)()

    async def act():
        for i in range(3):  # the client's third step is its last
            await environment.step(steps=i)
        await environment.step(steps=9)

    with pytest.raises(RuntimeError, match="over"):
        asyncio.run(act())
    assert environment._client.calls[-1] == {"steps": 2}


def test_a_field_of_two_types_is_refused(serve):
    fields = {
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "x": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
    with pytest.raises(ArgumentError, match=r"'x'.*integer.*string"):
        openenv_factory(serve({"properties": fields}), Client)


def test_a_server_without_a_schema_is_told_by_its_address(serve):
    url = serve(None)
    with pytest.raises(ArgumentError, match=rf"openenv:{url}.*500"):
        openenv_factory(url, Client)
