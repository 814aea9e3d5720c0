"""Episodes of verifiers 0.4 in this process, with the run's tokenizer and chat template.

Imported only where verifiers is installed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal

import httpx2
import verifiers.v1 as vf
from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens
from renderers.configs import BaseRendererConfig, CustomRendererConfig
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import default_harness_id

from lowpeak.environments.append import Message, can_append
from lowpeak.environments.turn_format import TurnFormat
from lowpeak.errors import ArgumentError, first_line
from lowpeak.rewards import BackgroundLoop

__all__ = ["ChatHarness"]  # verifiers looks here for the harness

_HARNESS = "lowpeak_harness"
# verifiers keeps the most tokens of a listed model for all its conversations, and each has its own.
_UNLISTED = "the policy"
_MOST_CALL_SECONDS = 600.0
# verifiers has locks that belong to the first loop that waits for them, so all episodes of the process share one.
_LOOP = BackgroundLoop()
# verifiers imports a harness by a name without dots.
sys.modules[_HARNESS] = sys.modules[__name__]
# It warns of each request without room; what ends an episode without a reward is raised.
logging.getLogger("verifiers").setLevel(logging.ERROR)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat with tools in this process: it ends with a turn without calls, or when no room is left."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages = wire_messages(*self.resolve_prompt(data))
        async with AsyncExitStack() as stack:
            spec = {name: {"url": url, "timeout": _MOST_CALL_SECONDS} for name, url in mcp_urls.items()}
            tools, dispatch, servers = await connect_mcp({"mcpServers": spec}, stack)
            # The interception is on this machine: certificates would take longer than the request.
            headers = {"Authorization": f"Bearer {secret}"}
            client = httpx2.AsyncClient(verify=False, timeout=None, headers=headers, trust_env=False)
            await stack.enter_async_context(client)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code == 400 and trace.num_turns and "max_branches" not in answer.text:
                    break  # no room for another turn, or a limit of verifiers
                answer.raise_for_status()
                choice = answer.json()["choices"][0]
                messages.append(choice["message"])
                calls = choice["message"].get("tool_calls")
                if not calls or choice["finish_reason"] == "length":
                    break
                messages += [await _result(call, dispatch, servers) for call in calls]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _result(call: Mapping[str, Any], dispatch: Any, servers: Any) -> Message:
    """Return the message with a call's result, or its error."""
    function = call["function"]
    try:
        content = await call_mcp(servers, dispatch, function["name"], json.loads(function["arguments"] or "{}"))
    except Exception as error:
        content = str({"error": str(error)})
    return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": content}


def wire_messages(system: str | None, prompt: Any) -> list[Message]:
    """Return the messages that open a task's conversation."""
    opening = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*opening, {"role": "user", "content": prompt}]
    return [*opening, *map(message_to_wire, prompt or ())]


class TemplateConfig(BaseRendererConfig):
    """The run's end tokens, and the arguments of its chat template as JSON."""

    name: Literal["custom"] = "custom"
    end_ids: tuple[int, ...] = ()
    template: str = "{}"
    _internal_fields = frozenset({"end_ids", "template"})


class TemplateRenderer:
    """The run's chat template as a renderer: a conversation's tokens are never tokenized again."""

    config_class: ClassVar[type] = TemplateConfig
    is_prefix_stable = False
    supports_tools = True

    def __init__(self, tokenizer: Any, config: TemplateConfig) -> None:
        self._tokenizer, self._end_ids = tokenizer, config.end_ids
        self._template = json.loads(config.template)
        self._formats: dict[str, TurnFormat] = {}

    def _options(self, tools: Sequence[Any] | None) -> dict[str, Any]:
        return {**self._template, **({"tools": tools} if tools else {})}

    def _format(self, tools: Sequence[Any] | None) -> TurnFormat:
        key = json.dumps(tools)
        if key not in self._formats:
            self._formats[key] = TurnFormat.of(self._tokenizer, self._end_ids, self._options(tools))
        return self._formats[key]

    def render(
        self, messages: list[Message], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        ids = self._tokenizer.apply_chat_template(
            [_with_mappings(message) for message in messages],
            **self._options(tools), add_generation_prompt=add_generation_prompt, return_dict=False,
        )  # fmt: skip
        return _attributed([], ids, messages)

    def render_ids(self, messages: list[Message], **options: Any) -> list[int]:
        return list(self.render(messages, **options).token_ids)

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        turn = self._format(tools).parse(token_ids, "user")
        calls = [ParsedToolCall("", call.name, dict(call.arguments)) for call in turn.calls]
        return ParsedResponse(turn.message.get("content") or "", turn.message.get("reasoning_content"), calls)

    def get_stop_token_ids(self) -> list[int]:
        return list(self._end_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Return the conversation so far and the new messages; None if these cannot be appended."""
        if not can_append(new_messages):
            return None
        before = [*previous_prompt_ids, *previous_completion_ids]
        return _attributed(before, self._format(tools).appender.append(before[-1], new_messages), new_messages)


def _attributed(before: list[int], ids: list[int], messages: list[Message]) -> RenderedTokens:
    """Return tokens of which the new ones belong to the last message."""
    owners = [-1] * len(before) + [len(messages) - 1] * len(ids)
    return RenderedTokens([*before, *ids], message_indices=owners, message_roles=[each["role"] for each in messages])


def _with_mappings(message: Message) -> Message:
    """Return a message whose calls have mappings of arguments, as chat templates want them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


class PackageEpisodes:
    """The episodes of the environment `name` of verifiers; `config` has more of its EnvConfig.

    Raises ArgumentError if it cannot be loaded, never ends its tasks, or has other agents than one.
    """

    _server: asyncio.Task[None] | None = None
    _is_ready: asyncio.Future[None]
    _is_closed: asyncio.Event

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        try:
            self._env = vf.load_environment(_env_config(name, config))
            if not self._env.taskset.bounded:
                raise ValueError("its tasks have no end: choose some by its taskset's config")
            self._tasks = list(self._env.taskset)
        except Exception as error:
            raise ArgumentError(
                f"verifiers cannot load {name!r} ({type(error).__name__}: {first_line(error)}): name an installed package or a "
                "module on PYTHONPATH, and a config that it takes."
            ) from error
        _share_path(type(self._env.taskset).__module__)
        self.prompts = [wire_messages(task.data.system_prompt, task.data.prompt) for task in self._tasks]
        self._folders: dict[Any, tempfile.TemporaryDirectory[str]] = {}

    async def run(self, task: int, endpoint: Any) -> float:
        reward = await asyncio.wrap_future(_LOOP.submit(self._run(self._tasks[task], endpoint)))
        return float(reward)

    async def _run(self, task: Any, endpoint: Any) -> float:
        await self._serve()
        client = vf.TrainClientConfig(
            base_url=endpoint.base_url,
            headers={"Authorization": f"Bearer {endpoint.api_key}"},
            renderer=CustomRendererConfig(
                import_path=f"{__name__}.TemplateRenderer",
                end_ids=sorted(endpoint.end_ids),
                template=json.dumps(endpoint.template),
            ),
            renderer_model_name=self._folder_of(endpoint.tokenizer),
        )
        episode = await self._env.run_episode(task, vf.ModelContext(model=_UNLISTED, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
        return sum(trace.reward for trace in episode.traces)

    def _folder_of(self, tokenizer: Any) -> str:
        """Return a folder with the tokenizer: verifiers loads one of its own from there."""
        if tokenizer not in self._folders:
            self._folders[tokenizer] = folder = tempfile.TemporaryDirectory(prefix="lowpeak-tokenizer-")
            tokenizer.save_pretrained(folder.name)
        return self._folders[tokenizer].name

    async def _serve(self) -> None:
        """Start what all episodes share, if it is not there: their tools' servers take seconds."""
        if self._server is None:
            self._is_ready, self._is_closed = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._server = asyncio.create_task(self._serve_until_closed())
        await asyncio.shield(self._is_ready)

    async def _serve_until_closed(self) -> None:
        try:
            async with self._env.serving():
                # Its interception keeps the client of each conversation until it ends, so each gets an interception of its own.
                self._env._interception = None
                self._is_ready.set_result(None)
                await self._is_closed.wait()
        except Exception as error:
            if self._is_ready.done():
                raise
            self._is_ready.set_exception(error)

    def close(self) -> None:
        _LOOP.run(self._close())

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._is_closed.set()
            await server


def _share_path(module: str) -> None:
    """Let processes import a module from where this one found it: servers of tools do, and one that cannot is waited for."""
    package = Path(str(sys.modules[module.partition(".")[0]].__file__))
    folder = str(package.parent.parent if package.name == "__init__.py" else package.parent)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in known and "site-packages" not in package.parts:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, known), folder])


def _env_config(name: str, config: Mapping[str, Any]) -> Any:
    """Return the environment's config: on this machine, and with a chat in this process unless it has a harness of its own."""
    own = {"harness": {"id": _HARNESS}} if default_harness_id(name) == "bash" else {}
    agent = {**own, "runtime": {"type": "subprocess"}, **config.get("agent", {})}
    kind = vf.env_config_type(name, config.get("id", ""))
    if (agents := [*agent_config_fields(kind.model_construct())]) != ["agent"]:
        raise ValueError(f"its agents are {', '.join(agents)}, and the policy plays one, named agent")
    return kind.model_validate({**config, "taskset": {"id": name, **config.get("taskset", {})}, "agent": agent})
