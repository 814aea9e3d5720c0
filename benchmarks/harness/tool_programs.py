"""The calculator's conversations, driven by programs: by chat, or by tokens."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from transformers.utils import get_json_schema

from benchmarks.harness.task import load_example
from lowpeak.environments.append import TurnAppender
from lowpeak.environments.calls import CallParser

calculator = load_example("calculator")
TOOLS = [get_json_schema(calculator.add)]


class _Program(ABC):
    """A program with a connection of its own; HTTP libraries cost more, and a pool of 256 connections several times more."""

    def reset(self, prompt: Sequence[Mapping[str, Any]], **row: Any) -> None:
        self.messages = [dict(message) for message in prompt]

    async def run(self, endpoint: Any) -> None:
        address = urlsplit(endpoint.base_url)
        self.reader, self.writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            await self.converse(endpoint)
        finally:
            self.writer.close()

    @abstractmethod
    async def converse(self, endpoint: Any) -> None: ...

    async def post(self, endpoint: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        head = f"POST /v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.api_key}\r\nContent-Length: {len(data)}"
        self.writer.write(f"{head}\r\n\r\n".encode() + data)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = int(answer.lower().split("content-length: ")[1].split("\r\n")[0])
        content = json.loads(await self.reader.readexactly(length))
        assert answer.split()[1] == "200", content
        return dict(content)


def _result(name: str, arguments: Mapping[str, Any]) -> str:
    """Return what `tools=` answers to a call."""
    if name != "add":
        return str({"error": f"Tool {name} not found."})
    try:
        return str(calculator.add(**arguments))
    except TypeError as error:
        return str({"error": str(error)})


class ByChat(_Program):
    """Chat completions, as with OpenAI's client."""

    async def converse(self, endpoint: Any) -> None:
        while True:
            body = {"model": endpoint.model, "messages": self.messages, "tools": TOOLS}
            message = (await self.post(endpoint, "/chat/completions", body))["choices"][0]["message"]
            self.messages.append(message)
            for call in message.get("tool_calls") or ():
                content = _result(call["function"]["name"], json.loads(call["function"]["arguments"]))
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if not message.get("tool_calls"):
                return


class ByTokens(_Program):
    """The token route: the program renders and parses."""

    parts: Any = None

    async def converse(self, endpoint: Any) -> None:
        options = {**endpoint.template, "tools": TOOLS}
        if ByTokens.parts is None:
            ByTokens.parts = tuple(
                make(endpoint.tokenizer, endpoint.end_ids, options) for make in (TurnAppender, CallParser)
            )
        appender, parser = ByTokens.parts
        text = endpoint.tokenizer.apply_chat_template(
            self.messages, tokenize=False, **{**options, "add_generation_prompt": True}
        )
        ids, role = list(endpoint.tokenizer(text, add_special_tokens=False)["input_ids"]), "user"
        while True:
            answer = await self.post(endpoint, "/inference/v1/generate", {"token_ids": ids})
            turn = answer["choices"][0]["token_ids"]
            calls = parser.parse(turn, role).calls
            if not calls:
                return
            results = [
                {"role": "tool", "name": each.name, "content": _result(each.name, each.arguments)} for each in calls
            ]
            ids, role = [*ids, *turn, *appender.append(turn[-1], results)], "tool"


PROGRAMS: dict[str, Callable[[], Any]] = {"chat": ByChat, "tokens": ByTokens}
