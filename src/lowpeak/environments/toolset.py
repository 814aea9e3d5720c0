"""The tools of a run: functions, and pools of environments, which are made once and reset for each conversation."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowpeak.arguments import ToolSettings, require
from lowpeak.data import check_environment_name, fetch_rows, num_rows
from lowpeak.environments.append import TurnAppender
from lowpeak.environments.calls import CallParser
from lowpeak.environments.tool_process import call_in_process, tool_address
from lowpeak.environments.tool_results import ToolResults
from lowpeak.environments.tool_runner import ToolRunner
from lowpeak.environments.tools import (
    ToolEnvironment,
    call_for_number,
    named_tools,
    public_methods,
    reset_arguments,
    tool_schemas,
    warn_of_failure,
)
from lowpeak.errors import ArgumentError, EngineError, first_line
from lowpeak.records import Conversation, Metric, Turn
from lowpeak.rewards import BackgroundLoop, FunctionReward


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
        self._pool = {name: [make_environment(name, make)] for name, make in self._factories.items()}
        self._opened: dict[int, Any] = {}  # since they were last closed
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

    def schemas_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas of the tools that a row's conversation has."""
        return self._schemas[self._name_of(row)]

    def check_template(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        """Raise DataError if the chat template does not write calls in a form that can be read, or no results."""
        for schemas in self._schemas.values():
            if schemas:
                CallParser(tokenizer, (), {**options, "tools": schemas})
                result = {"role": "tool", "name": schemas[0]["function"]["name"], "content": "43"}
                TurnAppender(tokenizer, (), {**options, "tools": schemas}).append(0, [result])

    def check_rows(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Raise ArgumentError if an environment's `reset` does not take the columns of a dataset's first row."""
        evals = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
        for dataset in (train_dataset, *evals):
            if dataset is not None and num_rows(dataset, "the dataset"):
                self.check_row(fetch_rows(dataset, [0])[0])

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ArgumentError if an environment's `reset` does not take the columns of this row."""
        columns = self._columns(row)
        for pool in self._pool.values():
            reset = pool[0].reset
            try:
                inspect.signature(reset).bind(**reset_arguments(pool[0], 0, columns))
            except TypeError as error:
                raise ArgumentError(
                    f"{type(pool[0]).__name__}.reset does not take the columns of a row as its arguments ({error}): define "
                    "reset(self, **row)."
                ) from error

    def rewards(self) -> list[FunctionReward]:
        """Return a reward for each class of environment that has `get_reward` or `get_turn_reward`, with its name.

        The class is that of a factory's first environment.
        """
        names_of = defaultdict[type[Any], list[str | None]](list)
        for name, pool in self._pool.items():
            if any(hasattr(pool[0], method) for method in ("get_reward", "get_turn_reward")):
                names_of[type(pool[0])].append(name)
        return [FunctionReward(self._reward_of(names), cls.__name__) for cls, names in names_of.items()]

    async def make_environments(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make the environments that these rows need beyond those that there are, off the event loop, at the same time."""
        needed = Counter(name for name in map(self._name_of, rows) if name in self._factories)
        calls = [name for name, number in needed.items() for _ in range(number - len(self._pool[name]))]

        async def make(name: str | None) -> Any:
            try:
                return await self.runner.run(make_environment, {"name": name, "make": self._factories[name]})
            except EngineError:
                raise
            except Exception as error:
                return _Unavailable(error)

        for name, instance in zip(calls, await asyncio.gather(*map(make, calls)), strict=True):
            self._pool[name].append(instance)

    def _name_of(self, row: Mapping[str, Any]) -> str | None:
        return row.get("environment") if self.is_routed else None

    def start(
        self, rows: Sequence[Mapping[str, Any]], results: ToolResults
    ) -> list[tuple[ToolEnvironment, dict[str, Any]]]:
        """Return an environment for each row, and the row that its `reset` gets; DataError for a name without a factory.

        `make_environments` has made as many as the rows need.
        """
        pools = {name: iter(pool) for name, pool in self._pool.items()}
        started = []
        for row in rows:
            name = self._name_of(row)
            if self.is_routed:
                check_environment_name(name, self._factories, "a row")
            instance = next(pools[name]) if name in pools else None
            environment = ToolEnvironment(
                *(self._functions(name, instance), self._tools.keys(), self._schemas[name], instance),
                *(self.runner, self._max_iterations, self.counts, results),
            )
            started.append((environment, self._columns(row)))
        self.environments = [each.instance for each, _ in started] if self._factories else None
        self._opened.update({id(each.instance): each.instance for each, _ in started})
        self._drop_unavailable()
        return started

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `reset` gets of a row."""
        return {key: value for key, value in row.items() if not (self.is_routed and key == "environment")}

    def _drop_unavailable(self) -> None:
        """Let another rollout try again to make the environments that could not be made."""
        for name, pool in self._pool.items():
            self._pool[name] = [instance for instance in pool if not isinstance(instance, _Unavailable)]

    def _functions(self, name: str | None, instance: Any) -> dict[str, Callable[..., Any]]:
        if instance is None:
            return self._tools
        methods, kind = public_methods(instance), type(instance).__name__
        if both := sorted(self._tools.keys() & methods.keys()):
            raise ArgumentError(f"{both[0]!r} is a tool and a method of {kind}: rename one.")
        return {**self._tools, **methods}

    def _reward_of(self, names: Sequence[str | None]) -> Callable[..., Any]:
        """Return a reward function of the environments of these factories; None for others, and for one that fails.

        With rewards of turns the value is a list with one number per token: `get_reward` counts at the last token.
        """

        async def read(conversation: Conversation, num_tokens: int) -> float | list[float] | None:
            environment = conversation.environment
            reward: float | None = 0.0
            if hasattr(environment, "get_reward"):
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
            own = {id(instance) for name in names for instance in self._pool[name]}

            async def read_own(conversation: Conversation, num_tokens: int) -> float | list[float] | None:
                is_own = id(conversation.environment) in own and not conversation.has_failed
                return await read(conversation, num_tokens) if is_own else None

            pairs = zip(conversations, completion_ids, strict=True)
            return list(await asyncio.gather(*(read_own(conversation, len(ids)) for conversation, ids in pairs)))

        def get_reward(conversations: Sequence[Conversation], completion_ids: Sequence[list[int]]) -> list[Any]:
            rewards: list[Any] = self.loop.run(read_all(conversations, completion_ids))
            return rewards

        return get_reward

    def close(self) -> None:
        """Close the environments that were opened and have a method `close`; log those that fail."""
        closable = [each for each in self._opened.values() if callable(getattr(each, "close", None))]
        self._opened.clear()

        async def close(instance: Any) -> None:
            try:
                await self.runner.run(instance.close, {})
            except Exception as error:
                warn_of_failure(instance, "close", error)

        async def close_all() -> None:
            await asyncio.gather(*map(close, closable))

        if closable:
            self.loop.run(close_all())


class _Unavailable:
    """Stands for an environment that could not be made: its conversation fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def reset(self, **row: Any) -> None:
        raise self._error


def make_environment(name: str | None, make: Callable[[], Any]) -> Any:
    """Return an environment of the factory; ArgumentError if it fails, or returns an object without `reset`."""
    factory = "environment_factory" if name is None else f"environment_factory[{name!r}]"
    require(callable(make), f"{factory} is {make!r:.80}: pass a class, or a function that returns an environment.")
    try:
        instance = make()
    except (Exception, SystemExit) as error:
        raise ArgumentError(
            f"{factory} raised {type(error).__name__}: {first_line(error)}; it is called without arguments (functools.partial "
            "adds some) and must return an environment."
        ) from error
    returned = "None" if instance is None else f"a {type(instance).__name__}"
    has_reset = callable(getattr(instance, "reset", None))
    require(has_reset, f"{factory} returns {returned}, which has no method reset: return an environment with one.")
    return instance


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
