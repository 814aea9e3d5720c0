"""TRL's `tools=` and `environment_factory=` as environments: functions that the policy calls by their schemas.

The contract is TRL's: a tool's result becomes a message with role "tool" and the text of the result, an exception the text of
{"error": message}. Every public method of an environment is a tool, except those of `_NOT_TOOLS`. Beyond TRL: `respond` answers
a turn without calls, `run` drives the conversation in place of both, `get_turn_reward` is the reward of the turn that was
answered, `close` is called at the end, and `reset` gets a `seed` if it names one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lowpeak.environments.append import Message
from lowpeak.environments.calls import Call, ParsedTurn
from lowpeak.environments.routes import Endpoint
from lowpeak.environments.tool_results import ResultRow, RolloutResults
from lowpeak.environments.tool_runner import ToolRunner, ToolTimeoutError, exits_as_errors, text_of
from lowpeak.errors import ArgumentError, EngineError, files_of, line_in_files
from lowpeak.rewards import read_number

logger = logging.getLogger(__name__)

_NOT_TOOLS = ("reset", "run", "respond", "get_reward", "get_turn_reward", "close")
_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def tool_schemas(functions: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the schema of each function; ArgumentError for one without annotations or a documented argument."""
    schemas = []
    for name, function in functions.items():
        try:
            schemas.append(get_json_schema(function))
            unnamed = [str(each) for each in inspect.signature(function).parameters.values() if each.kind in _UNNAMED]
            if unnamed:
                raise TypeError(f"a call cannot name its argument {unnamed[0]}")
        except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
            tool, way_out = f"tool {name!r}", ""
            if inspect.ismethod(function):
                owner = function.__self__ if inspect.isclass(function.__self__) else type(function.__self__)
                tool, way_out = f"method {name!r} of {owner.__name__}", ", or begin its name with _"
            raise ArgumentError(
                f"{tool} has no schema ({' '.join(str(error).split())}): name and annotate each argument, and describe the "
                f"function and each argument in a Google-style docstring{way_out}."
            ) from error
    return schemas


def named_tools(tools: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return tools by name; ArgumentError for one that is no function, or for two of one name."""
    named: dict[str, Callable[..., Any]] = {}
    for tool in tools:
        name = getattr(tool, "__name__", None)
        if inspect.isclass(tool):
            raise ArgumentError(f"tools has the class {name}: pass it as environment_factory, or pass functions.")
        if not callable(tool) or name in (None, "<lambda>"):
            raise ArgumentError(
                f"tools has {tool!r:.80}, which is not a function with a name: pass a list of functions that `def` defines, which "
                "may call lambdas, partials and objects."
            )
        if name in named:
            raise ArgumentError(f"two tools are called {name!r}: rename one.")
        named[name] = tool
    return named


def drives(instance: Any) -> bool:
    """Return whether an environment is a program that asks for turns itself."""
    return callable(getattr(instance, "run", None))


def public_methods(instance: Any) -> dict[str, Callable[..., Any]]:
    """Return an environment's tools: its public methods, inherited, static and class methods too; none if it drives."""
    if drives(instance):
        return {}
    methods = inspect.getmembers(type(instance), lambda member: inspect.isfunction(member) or inspect.ismethod(member))
    names = [name for name, _ in methods]
    return {name: getattr(instance, name) for name in names if not name.startswith("_") and name not in _NOT_TOOLS}


@dataclass(frozen=True)
class Reply:
    """Messages that follow a turn, and the turn's reward; without messages the conversation ends."""

    messages: Sequence[Message] = ()
    reward: float | None = None


class MethodError(Exception):
    """A method of an environment, other than a tool, raised `error`."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__(method, error)
        self.method, self.error = method, error


@dataclass(eq=False)
class ToolEnvironment:
    """The tools of one conversation, with an environment of the user's class or None.

    functions       the tools by name: functions, and the methods of `instance`
    replayed        names of those whose results are used again after a restart
    schemas         of the tools
    max_iterations  bounds the turns whose calls are run (None: no bound)
    counts          gets `calls`, `failures`, `timeouts`
    """

    functions: Mapping[str, Callable[..., Any]]
    replayed: Collection[str]
    schemas: Sequence[Mapping[str, Any]]
    instance: Any
    runner: ToolRunner
    max_iterations: int | None
    counts: Counter[str]
    results: RolloutResults
    _num_iterations: int = 0

    async def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """Start a conversation for a row of the dataset; return the text that is added to its prompt."""
        if self.instance is None:
            return ""
        observation = await self.runner.run(self.instance.reset, reset_arguments(self.instance, seed, row))
        return _observation_text(observation, type(self.instance).__name__)

    async def step(self, turn: ParsedTurn, name: str) -> Reply:
        """Run the calls of a turn that the policy ended itself, or let the environment respond to its text.

        `name` is the turn's, unique in its rollout. Raises MethodError.
        """
        responds = hasattr(self.instance, "respond") and not turn.num_malformed
        if self._num_iterations == self.max_iterations or not (turn.calls or responds):
            return Reply()
        self._num_iterations += 1
        messages = await (self._results(turn.calls, name) if turn.calls else self._response(turn.message))
        if not hasattr(self.instance, "get_turn_reward"):
            return Reply(messages)
        return Reply(messages, await self._call("get_turn_reward", self._turn_reward()))

    async def drive(self, endpoint: Endpoint) -> None:
        """Run the environment's program; MethodError if it fails."""
        await self._call("run", self.runner.for_programs.run(partial(self.instance.run, endpoint), {}))

    async def _results(self, calls: Sequence[Call], name: str) -> list[Message]:
        texts = await asyncio.gather(*(self._run(call, f"{name}/{i}") for i, call in enumerate(calls)))
        return [{"role": "tool", "name": call.name, "content": text} for call, text in zip(calls, texts, strict=True)]

    async def _response(self, turn: Message) -> list[Message]:
        """Return the environment's next message; none if it ends the conversation."""
        response = await self._call(
            "respond", self.runner.run(self.instance.respond, {"text": turn.get("content") or ""})
        )
        if response is None:
            return []
        if not isinstance(response, str):
            raise MethodError("respond", TypeError(f"it returned {response!r:.80}; return a string, or None"))
        return [{"role": "user", "content": _readable(response)}]

    async def _turn_reward(self) -> float | None:
        return await call_for_number(self.runner, self.instance.get_turn_reward)

    async def _call(self, method: str, awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except EngineError:
            raise
        except Exception as error:
            raise MethodError(method, error) from error

    async def _run(self, call: Call, name: str) -> str:
        """Return the text of a call's result, or of its error; a result that is known is used again."""
        self.counts["calls"] += 1
        # An environment's state is in this process: after a restart its methods run again.
        is_replayed = call.name in self.replayed
        row = self.results.find(name) if is_replayed else None
        if row is None:
            row = await self._result(call)
            if is_replayed:
                self.results.add(name, row)
        self.counts["failures"] += "error" in row
        self.counts["timeouts"] += "is_late" in row
        return str({"error": row["error"]}) if "error" in row else str(row["result"])

    async def _result(self, call: Call) -> ResultRow:
        row: dict[str, Any] = {"name": call.name, "arguments": call.arguments}
        start = time.perf_counter()
        try:
            if call.name not in self.functions:
                raise LookupError(f"Tool {call.name} not found.")
            result = await self.runner.run(self.functions[call.name], call.arguments)
            with exits_as_errors():
                row["result"] = _readable(str(result))
        except EngineError:
            raise
        except Exception as error:
            row["error"] = _readable(text_of(error))
            if isinstance(error, ToolTimeoutError):
                row["is_late"] = True
        return {**row, "seconds": round(time.perf_counter() - start, 4)}


async def call_for_number(runner: ToolRunner, method: Callable[..., Any]) -> float | None:
    """Return the number or None that a method of an environment returns; TypeError for anything else."""
    value = await runner.run(method, {})
    number, problem = read_number(value)
    if problem:
        raise TypeError(f"it returned {problem}; return a finite number, or None")
    return None if value is None else number


def _readable(text: str) -> str:
    """Return the text with a question mark in place of lone surrogates, which tokenizers and the journal cannot store."""
    return text.encode("utf-8", "replace").decode()


def reset_arguments(instance: Any, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row, with the seed if `reset` names one and the row has none."""
    accepts_seed = "seed" in inspect.signature(instance.reset).parameters and "seed" not in row
    return {**row, **({"seed": seed} if accepts_seed else {})}


def _observation_text(observation: Any, name: str) -> str:
    """Return `reset`'s addition to the prompt; TypeError unless it is a string, parts of text, or None."""
    if observation is None or isinstance(observation, str):
        return _readable(observation or "")
    parts = observation if isinstance(observation, list) else [observation]
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return _readable("".join(part["text"] for part in parts))
    raise TypeError(f"{name}.reset() returned {observation!r:.80}; return a string, or None.")


def warn_of_failure(environment: Any, method: str, error: Exception) -> None:
    """Log in one line which method of an environment failed, how and where; the record has the error, too."""
    kind, text = type(environment), text_of(error).strip().partition("\n")[0]
    parts = (kind.__name__, method, type(error).__name__, text, line_in_files(error, files_of(kind)))
    logger.warning("%s.%s raised %s: %s%s", *parts, extra={"error": error})
