"""TRL's `tools=` and `environment_factory=` as environments: functions that the policy calls by their schemas.

The contract is TRL's: a tool's result becomes a message with role "tool" and the text of the result, an exception the text of
{"error": message}. Every public method of an environment is a tool, except those of `_NOT_TOOLS`. Beyond TRL:
`get_turn_reward` is the reward of the turn whose calls were run, `close` is called at the end, and `reset` gets a `seed` if it
names one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lowpeak.arguments import ToolSettings, require
from lowpeak.data import check_environment_name
from lowpeak.environments.append import Message, TurnAppender
from lowpeak.environments.calls import Call, CallParser, ParsedTurn
from lowpeak.environments.tool_process import call_in_process, tool_address
from lowpeak.environments.tool_results import ResultRow, ToolResults
from lowpeak.environments.tool_runner import ToolRunner, ToolTimeoutError, exits_as_errors, text_of
from lowpeak.errors import ArgumentError, EngineError, first_line
from lowpeak.records import Conversation, Metric, Turn
from lowpeak.rewards import BackgroundLoop, FunctionReward, read_number

logger = logging.getLogger(__name__)

_NOT_TOOLS = ("reset", "get_reward", "get_turn_reward", "close")
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


def public_methods(instance: Any) -> dict[str, Callable[..., Any]]:
    """Return an environment's tools: its public methods, inherited, static and class methods too."""
    methods = inspect.getmembers(type(instance), lambda member: inspect.isfunction(member) or inspect.ismethod(member))
    names = [name for name, _ in methods]
    return {name: getattr(instance, name) for name in names if not name.startswith("_") and name not in _NOT_TOOLS}


@dataclass(frozen=True)
class Reply:
    """Messages that follow a turn, and the turn's reward; without messages the conversation ends."""

    messages: Sequence[Message] = ()
    reward: float | None = None


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
    results: ToolResults
    _num_iterations: int = 0

    async def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """Start a conversation for a row of the dataset; return the text that is added to its prompt."""
        if self.instance is None:
            return ""
        observation = await self.runner.run(self.instance.reset, _reset_arguments(self.instance, seed, row))
        return _observation_text(observation, type(self.instance).__name__)

    async def step(self, turn: ParsedTurn, name: str) -> Reply:
        """Run the calls of a turn that the policy ended itself; `name` is the turn's, unique in its rollout."""
        if not turn.calls or self._num_iterations == self.max_iterations:
            return Reply()
        self._num_iterations += 1
        results = await asyncio.gather(*(self._run(call, f"{name}/{i}") for i, call in enumerate(turn.calls)))
        named = zip(turn.calls, results, strict=True)
        messages = [{"role": "tool", "name": call.name, "content": text} for call, text in named]
        if not hasattr(self.instance, "get_turn_reward"):
            return Reply(messages)
        return Reply(messages, await call_for_number(self.runner, self.instance.get_turn_reward))

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


def _reset_arguments(instance: Any, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row, with the seed if `reset` names one and the row has none."""
    accepts_seed = "seed" in inspect.signature(instance.reset).parameters and "seed" not in row
    return {**row, **({"seed": seed} if accepts_seed else {})}


def _observation_text(observation: Any, name: str) -> str:
    """Return what `reset` adds to the prompt; TypeError unless it is a string, parts of text, or None."""
    if observation is None or isinstance(observation, str):
        return _readable(observation or "")
    parts = observation if isinstance(observation, list) else [observation]
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return _readable("".join(part["text"] for part in parts))
    raise TypeError(f"{name}.reset() returned {observation!r:.80}; return a string, or None.")


class Toolset:
    """The tools of a run: functions, and the factories of environments, by the name in a row's column `environment`.

    Raises ArgumentError for a tool without a schema, two of one name, or an environment without `reset`.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], environment_factory: Any, settings: ToolSettings) -> None:
        self._tools = named_tools(tools)
        if settings.tool_isolation == "process":
            self._tools = {name: _isolated(name, function) for name, function in self._tools.items()}
        self._max_iterations = settings.max_tool_calling_iterations
        self.is_routed = isinstance(environment_factory, Mapping)
        factories = environment_factory if self.is_routed else {None: environment_factory}
        self._factories: dict[str | None, Callable[[], Any]] = {} if environment_factory is None else dict(factories)
        # Environments are made once and reset for each conversation.
        self._pool = {name: [_make_environment(name, make)] for name, make in self._factories.items()}
        self._schemas = {name: tool_schemas(self._functions(name, pool[0])) for name, pool in self._pool.items()}
        self._schemas.setdefault(None, tool_schemas(self._tools))
        self.runner = ToolRunner(settings.tool_timeout)
        self.counts = Counter[str]()
        self.loop = BackgroundLoop()
        self.add_metrics: Callable[[dict[str, Metric]], None] = lambda metrics: None
        self.environments: list[Any] | None = None  # of the last rollout, in the order of its completions

    @property
    def has_environments(self) -> bool:
        return bool(self._factories)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools that every conversation has."""
        return self._schemas[None]

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """All tools: functions, and the methods of each environment."""
        methods = [method for pool in self._pool.values() for method in public_methods(pool[0]).values()]
        return [*self._tools.values(), *methods]

    def check_template(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        """Raise DataError if the chat template does not write calls in a form that can be read, or no results."""
        for schemas in self._schemas.values():
            if schemas:
                CallParser(tokenizer, (), {**options, "tools": schemas})
                result = {"role": "tool", "name": schemas[0]["function"]["name"], "content": "43"}
                TurnAppender(tokenizer, (), {**options, "tools": schemas}).append(0, [result])

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ArgumentError if an environment's `reset` does not take the columns of this row."""
        columns = {key: value for key, value in row.items() if not (self.is_routed and key == "environment")}
        for pool in self._pool.values():
            reset = pool[0].reset
            try:
                inspect.signature(reset).bind(**_reset_arguments(pool[0], 0, columns))
            except TypeError as error:
                raise ArgumentError(
                    f"{type(pool[0]).__name__}.reset does not take the columns of a row as its arguments ({error}): define "
                    "reset(self, **row)."
                ) from error

    def rewards(self) -> list[FunctionReward]:
        """Return a reward for each class of environment that has `get_reward` or `get_turn_reward`, with its name."""
        names = ("get_reward", "get_turn_reward")
        classes = dict.fromkeys(
            type(pool[0]) for pool in self._pool.values() if any(hasattr(pool[0], name) for name in names)
        )
        return [FunctionReward(self._reward_of(cls), cls.__name__) for cls in classes]

    def start(
        self, rows: Sequence[Mapping[str, Any]], results: ToolResults
    ) -> list[tuple[ToolEnvironment, dict[str, Any]]]:
        """Return an environment for each row, and the row that its `reset` gets; DataError for a name without a factory."""
        used = Counter[str | None]()
        started = []
        for row in rows:
            name = row.get("environment") if self.is_routed else None
            if self.is_routed:
                check_environment_name(name, self._factories, "a row")
            instance = self._instance(name, used[name]) if name in self._factories else None
            used[name] += 1
            environment = ToolEnvironment(
                *(self._functions(name, instance), self._tools.keys(), self._schemas[name], instance),
                *(self.runner, self._max_iterations, self.counts, results),
            )
            columns = {key: value for key, value in row.items() if not (self.is_routed and key == "environment")}
            started.append((environment, columns))
        self.environments = [each.instance for each, _ in started] if self._factories else None
        return started

    def _instance(self, name: str | None, number: int) -> Any:
        pool = self._pool[name]
        while len(pool) <= number:
            pool.append(_make_environment(name, self._factories[name]))
        return pool[number]

    def _functions(self, name: str | None, instance: Any) -> dict[str, Callable[..., Any]]:
        if instance is None:
            return self._tools
        methods, kind = public_methods(instance), type(instance).__name__
        if both := sorted(self._tools.keys() & methods.keys()):
            raise ArgumentError(f"{both[0]!r} is a tool and a method of {kind}: rename one.")
        return {**self._tools, **methods}

    def _reward_of(self, cls: type[Any]) -> Callable[..., Any]:
        """Return a reward function of the environments of a class; None for others, and for one that fails.

        With rewards of turns the value is a list with one number per token: `get_reward` counts at the last token.
        """

        async def read(conversation: Conversation, num_tokens: int) -> float | list[float] | None:
            environment = conversation.environment
            if type(environment) is not cls or conversation.has_failed:
                return None
            reward: float | None = 0.0
            if hasattr(cls, "get_reward"):
                try:
                    reward = await call_for_number(self.runner, environment.get_reward)
                except EngineError:
                    raise
                except Exception as error:
                    self.add_metrics({"environments/failures": Metric(1.0, 1.0, "sum")})
                    warn_of_failure(environment, "get_reward", error)
                    conversation.has_failed = True
                    return None
            return _per_token(reward, conversation.turns, num_tokens)

        async def read_all(conversations: Sequence[Conversation], completion_ids: Sequence[list[int]]) -> list[Any]:
            pairs = zip(conversations, completion_ids, strict=True)
            return list(await asyncio.gather(*(read(conversation, len(ids)) for conversation, ids in pairs)))

        def get_reward(conversations: Sequence[Conversation], completion_ids: Sequence[list[int]]) -> list[Any]:
            rewards: list[Any] = self.loop.run(read_all(conversations, completion_ids))
            return rewards

        return get_reward

    def close(self) -> None:
        """Close the environments that have a method `close`; log those that fail."""
        instances = (each for pool in self._pool.values() for each in pool)
        closable = [each for each in instances if callable(getattr(each, "close", None))]

        async def close(instance: Any) -> None:
            try:
                await self.runner.run(instance.close, {})
            except Exception as error:
                warn_of_failure(instance, "close", error)

        async def close_all() -> None:
            await asyncio.gather(*map(close, closable))

        if closable:
            self.loop.run(close_all())


def _make_environment(name: str | None, make: Callable[[], Any]) -> Any:
    """Return an environment of the factory; ArgumentError if it fails, or returns an object without `reset`."""
    factory = "environment_factory" if name is None else f"environment_factory[{name!r}]"
    require(callable(make), f"{factory} is {make!r:.80}: pass a class, or a function that returns an environment.")
    try:
        instance = make()
    except Exception as error:
        raise ArgumentError(
            f"{factory} raised {type(error).__name__}: {first_line(error)}; it is called without arguments (functools.partial "
            "adds some) and must return an environment."
        ) from error
    returned = "None" if instance is None else f"a {type(instance).__name__}"
    has_reset = callable(getattr(instance, "reset", None))
    require(has_reset, f"{factory} returns {returned}, which has no method reset: return an environment with one.")
    return instance


def warn_of_failure(environment: Any, method: str, error: Exception) -> None:
    """Log which method of an environment failed, and how."""
    logger.warning("%s.%s raised %s: %s", type(environment).__name__, method, type(error).__name__, error)


def _per_token(reward: float | None, turns: Sequence[Turn], num_tokens: int) -> float | list[float] | None:
    """Return the reward with those of the turns, at each turn's last token; unchanged if no turn has one."""
    if reward is None or all(turn.reward is None for turn in turns):
        return reward
    values = [0.0] * num_tokens
    for turn in turns:
        values[turn.last] += turn.reward or 0.0
    values[turns[-1].last] += reward
    return values


def _isolated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an async function with the same schema that calls a tool in a process of its own."""
    address = tool_address(name, function)

    @functools.wraps(function)
    async def isolated(**arguments: Any) -> str:
        return await call_in_process(address, arguments)

    return isolated
