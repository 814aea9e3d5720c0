"""TRL's `tools=` and `environment_factory=` as environments: functions that the policy calls by their schemas.

The contract is TRL's: a tool's result becomes a message with role "tool" and the text of the result, an exception the text of
{"error": message}. Every public method of an environment but `reset` and `get_reward` is a tool.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lowpeak.environments.calls import Call, ParsedTurn
from lowpeak.environments.environment import Environment, Opening, Reply
from lowpeak.environments.tool_runner import ToolRunner, ToolTimeoutError
from lowpeak.errors import ArgumentError, EngineError

_NOT_TOOLS = ("reset", "get_reward", "close")


def tool_schemas(functions: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the schema of each function; ArgumentError for one without annotations or a documented argument."""
    schemas = []
    for name, function in functions.items():
        try:
            schemas.append(get_json_schema(function))
        except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
            raise ArgumentError(
                f"tool {name!r} has no schema ({' '.join(str(error).split())}): annotate each argument, and describe the "
                "function and each argument in a Google-style docstring."
            ) from error
    return schemas


def named_tools(tools: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return tools by name; ArgumentError for one that is no function, or for two of one name."""
    named: dict[str, Callable[..., Any]] = {}
    for tool in tools:
        name = getattr(tool, "__name__", None)
        if not callable(tool) or name is None:
            raise ArgumentError(f"tools has {tool!r:.80}, which is not a function.")
        if name in named:
            raise ArgumentError(f"two tools are called {name!r}: rename one.")
        named[name] = tool
    return named


def public_methods(instance: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment: its public methods, inherited ones too, but `reset`, `get_reward` and `close`."""
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    return {name: getattr(instance, name) for name in names if not name.startswith("_") and name not in _NOT_TOOLS}


class ToolEnvironment(Environment):
    """The tools of one conversation, with an environment of the user's class or None.

    `max_iterations` bounds the turns whose calls are run (None: no bound). `counts` has `calls`, `failures` and `timeouts`.
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        instance: Any,
        runner: ToolRunner,
        max_iterations: int | None,
        counts: Counter[str],
    ) -> None:
        self.instance = instance
        methods = {} if instance is None else public_methods(instance)
        if both := sorted(tools.keys() & methods.keys()):
            raise ArgumentError(f"{both[0]!r} is a tool and a method of {type(instance).__name__}: rename one.")
        self._functions = {**tools, **methods}
        self._schemas = tool_schemas(self._functions)
        self._runner, self._max_iterations, self._counts = runner, max_iterations, counts
        self._num_iterations = 0

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        self._num_iterations = 0
        if self.instance is None:
            return Opening(tools=self._schemas)
        accepts_seed = "seed" in inspect.signature(self.instance.reset).parameters and "seed" not in row
        observation = await self._runner.run(self.instance.reset, {**row, **({"seed": seed} if accepts_seed else {})})
        return Opening(_observation_text(observation, type(self.instance).__name__), self._schemas)

    async def step(self, turn: ParsedTurn) -> Reply:
        if not turn.calls or self._num_iterations == self._max_iterations:
            return Reply()
        self._num_iterations += 1
        results = await asyncio.gather(*(self._run(call) for call in turn.calls))
        named = zip(turn.calls, results, strict=True)
        return Reply([{"role": "tool", "name": call.name, "content": text} for call, text in named])

    async def _run(self, call: Call) -> str:
        """Return the text of a call's result, or of its error."""
        self._counts["calls"] += 1
        function = self._functions.get(call.name)
        try:
            if function is None:
                raise LookupError(f"Tool {call.name} not found.")
            return str(await self._runner.run(function, call.arguments))
        except EngineError:
            raise
        except (Exception, SystemExit) as error:
            self._counts["failures"] += 1
            self._counts["timeouts"] += isinstance(error, ToolTimeoutError)
            return str({"error": str(error)})

    def close(self) -> None:
        close = getattr(self.instance, "close", None)
        if callable(close):
            close()


def _observation_text(observation: Any, name: str) -> str:
    """Return what `reset` adds to the prompt; TypeError unless it is a string, parts of text, or None."""
    if observation is None or isinstance(observation, str):
        return observation or ""
    parts = observation if isinstance(observation, list) else [observation]
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    raise TypeError(f"{name}.reset() returned {observation!r:.80}; return a string, or None.")
