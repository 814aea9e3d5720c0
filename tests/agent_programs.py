"""Environments that drive their conversations: programs written against HTTP, for tests of the routes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from lowpeak.environments.routes import Endpoint
from lowpeak.environments.tools import tool_schemas
from scripted_turns import add


class RefusedHttp(Exception):
    """A request that the routes refused; `status` and the message of the error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """A client of the routes for one conversation."""

    def __init__(self, client: httpx2.AsyncClient, model: str) -> None:
        self.client, self.model = client, model

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        response = await self.client.post(path, json=body)
        content = response.json()
        if response.status_code != 200:
            raise RefusedHttp(response.status_code, content["error"]["message"])
        return dict(content)

    async def turn(self, ids: Sequence[int], **params: Any) -> list[int]:
        """Return the tokens of the turn after `ids`."""
        body = {"model": self.model, "token_ids": list(ids), "sampling_params": params}
        (choice,) = (await self.post("/inference/v1/generate", body))["choices"]
        assert [each["token_id"] for each in choice["logprobs"]["content"]] == choice["token_ids"]
        return list(choice["token_ids"])

    async def chat(self, messages: Sequence[Mapping[str, Any]], **params: Any) -> dict[str, Any]:
        """Return the assistant's message after `messages`."""
        answer = await self.post("/chat/completions", {"model": self.model, "messages": messages, **params})
        return dict(answer["choices"][0]["message"])


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[Client]:
    """Open a client for an endpoint."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx2.AsyncClient(base_url=endpoint.base_url, headers=headers, timeout=60) as client:
        yield Client(client, endpoint.model)


class ChatProgram:
    """An agent's loop by chat completions: it runs the calls of `add` until a turn has none."""

    num_started = 0

    def reset(self, **row: Any) -> None:
        self.messages = [dict(message) for message in row["prompt"]]

    async def run(self, endpoint: Endpoint) -> None:
        ChatProgram.num_started += 1
        async with connect(endpoint) as client:
            while True:
                message = await client.chat(self.messages, tools=tool_schemas({"add": add}))
                self.messages.append(message)
                if not message.get("tool_calls"):
                    return
                for each in message["tool_calls"]:
                    name, arguments = each["function"]["name"], json.loads(each["function"]["arguments"])
                    result = str(add(**arguments) if name == "add" else {"error": f"Tool {name} not found."})
                    self.messages.append({"role": "tool", "tool_call_id": each["id"], "content": result})


class ChatCalculator(ChatProgram):
    """The same with a reward of its own: the number of messages."""

    def get_reward(self) -> float:
        return float(len(self.messages))


def agent(run: Any) -> type:
    """Return a class of environments that run `run(client, row)`; what it returns is the reward."""

    class Agent:
        def reset(self, **row: Any) -> None:
            self.row, self.reward = row, 0.0

        async def run(self, endpoint: Endpoint) -> None:
            async with connect(endpoint) as client:
                self.reward = float(await run(client, self.row) or 0.0)

        def get_reward(self) -> float:
            return self.reward

    return Agent
