"""The tools of a run: functions, and pools of environments, which are made once and reset for each conversation."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowpeak.arguments import ToolSettings, require
from lowpeak.data import check_environment_name, fetch_rows, num_rows
from lowpeak.environments.append import TurnAppender
from lowpeak.environments.calls import CallParser
from lowpeak.environments.routes import Routes
from lowpeak.environments.tool_process import call_in_process, tool_address
from lowpeak.environments.tool_results import RolloutResults
from lowpeak.environments.tool_runner import ToolRunner
from lowpeak.environments.tools import (
    ToolEnvironment,
    call_for_number,
    drives,
    named_tools,
    public_methods,
    reset_arguments,
    tool_schemas,
    warn_of_failure,
)
from lowpeak.errors import ArgumentError, EngineError, LowpeakError, first_line, require_package
from lowpeak.records import Conversation, Metric, Turn
from lowpeak.rewards import BackgroundLoop, FunctionReward

_TOOL_TYPES = ("str", "int", "float", "bool", "list", "dict")


@dataclass(eq=False)
class PoolSlot:
    """A slot of a pool; its environment is made once and reset for each conversation."""

    instance: Any = None


@dataclass(eq=False)
class WaveEnvironments:
    """The slots of a wave's conversations; None for a row without an environment.

    `instances` are their environments once they are made: one that could not be made is `_Unavailable` for this wave.
    """

    rows: Sequence[Mapping[str, Any]]
    slots: Sequence[PoolSlot | None]
    instances: list[Any] = field(default_factory=list)


class Toolset:
    """The tools of a run: functions, and the factories of environments, by the name in a row's column `environment`.

    Raises ArgumentError for a tool without a schema, two of one name, or an environment without `reset`.

        environments = toolset.reserve(rows)              # the run's thread, in the order of rollouts
        await toolset.make_environments(environments)     # on the loop
        toolset.tool_environments(environments, results, counts)
        toolset.set_current(environments)                 # the run's thread: rewards read them until another wave's are current
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], environment_factory: Any, settings: ToolSettings) -> None:
        self._tools = named_tools(tools)
        if settings.tool_isolation == "process":
            self._tools = {name: _isolated(name, function) for name, function in self._tools.items()}
        self._max_iterations = settings.max_tool_calling_iterations
        self.max_branches, self.timeout = settings.max_branches, settings.tool_timeout
        self.is_routed = isinstance(environment_factory, Mapping)
        factories = environment_factory if self.is_routed else {None: environment_factory}
        self._factories: dict[str | None, Callable[[], Any]] = {} if environment_factory is None else dict(factories)
        self._first = {name: make_environment(name, make) for name, make in self._factories.items()}
        if self.has_programs:
            require_package("uvicorn", "an environment with a method run", "agents")
            require(
                not self._tools,
                "tools has no effect with an environment that has a method run, which calls functions itself: remove it.",
            )
        self._pool = {name: [PoolSlot(instance)] for name, instance in self._first.items()}
        self._reserved: set[PoolSlot] = set()
        self._current: WaveEnvironments | None = None
        self._opened: dict[int, Any] = {}  # since they were last closed
        self._schemas = {name: tool_schemas(self._functions(name, first)) for name, first in self._first.items()}
        self._schemas.setdefault(None, tool_schemas(self._tools))
        self.runner = ToolRunner(settings.tool_timeout)
        self.loop = BackgroundLoop()
        self.routes = Routes()
        self.add_metrics: Callable[[dict[str, Metric]], None] = lambda metrics: None

    @property
    def max_turns(self) -> int | None:
        """The most turns of a conversation."""
        return None if self._max_iterations is None else self._max_iterations + 1

    @property
    def has_programs(self) -> bool:
        """Whether an environment drives its conversations."""
        return any(map(drives, self._first.values()))

    @property
    def has_environments(self) -> bool:
        return bool(self._factories)

    @property
    def environments(self) -> list[Any] | None:
        """Those of the last rollout, in the order of its completions."""
        return list(self._current.instances) if self._current is not None and self._factories else None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools that every conversation has."""
        return self._schemas[None]

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """All tools: functions, and the methods of each environment."""
        methods = [method for first in self._first.values() for method in public_methods(first).values()]
        return [*self._tools.values(), *methods]

    def schemas_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas of the tools that a row's conversation has."""
        return self._schemas[self._name_of(row)]

    def first_of(self, row: Mapping[str, Any]) -> Any:
        """Return the first environment of a row's factory; None for a row without one."""
        return self._first.get(self._name_of(row))

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
        for first in self._first.values():
            try:
                inspect.signature(first.reset).bind(**reset_arguments(first, 0, columns))
            except TypeError as error:
                raise ArgumentError(
                    f"{type(first).__name__}.reset does not take the columns of a row as its arguments ({error}): define "
                    "reset(self, **row)."
                ) from error

    def rewards(self) -> list[FunctionReward]:
        """Return a reward for each class of environment that has `get_reward` or `get_turn_reward`, with its name.

        The class is that of a factory's first environment.
        """
        names_of = defaultdict[type[Any], list[str | None]](list)
        for name, first in self._first.items():
            if any(hasattr(first, method) for method in ("get_reward", "get_turn_reward")):
                names_of[type(first)].append(name)
        return [FunctionReward(self._reward_of(names), cls.__name__) for cls, names in names_of.items()]

    def reserve(self, rows: Sequence[Mapping[str, Any]]) -> WaveEnvironments:
        """Return free slots for the environments of these rows."""
        free = {name: iter([slot for slot in pool if slot not in self._reserved]) for name, pool in self._pool.items()}
        slots: list[PoolSlot | None] = []
        for row in rows:
            name, slot = self._name_of(row), None
            if name in self._factories and (slot := next(free[name], None)) is None:
                slot = PoolSlot()
                self._pool[name].append(slot)
            slots.append(slot)
        self._reserved.update(slot for slot in slots if slot is not None)
        return WaveEnvironments(rows, slots)

    def set_current(self, environments: WaveEnvironments | None) -> None:
        """Make these the environments that rewards read, and free the slots of those before."""
        if self._current is not None and self._current is not environments:
            self.free(self._current)
        self._current = environments

    def free(self, environments: WaveEnvironments) -> None:
        """Let other conversations use the slots."""
        self._reserved.difference_update(slot for slot in environments.slots if slot is not None)

    async def make_environments(self, environments: WaveEnvironments) -> None:
        """Make the environments that these slots lack, off the event loop, at the same time."""

        async def make(row: Mapping[str, Any], slot: PoolSlot | None) -> Any:
            if slot is None or slot.instance is not None:
                return slot and slot.instance
            name = self._name_of(row)
            try:
                slot.instance = await self.runner.run(make_environment, {"name": name, "make": self._factories[name]})
            except EngineError:
                raise
            except Exception as error:
                return _Unavailable(error)
            return slot.instance

        environments.instances = list(await asyncio.gather(*map(make, environments.rows, environments.slots)))

    def _name_of(self, row: Mapping[str, Any]) -> str | None:
        return row.get("environment") if self.is_routed else None

    def tool_environments(
        self, environments: WaveEnvironments, results: RolloutResults, counts: Counter[str]
    ) -> list[tuple[ToolEnvironment, dict[str, Any]]]:
        """Return an environment for each row, and the row that its `reset` gets; DataError for a name without a factory.

        `make_environments` comes before.
        """
        started = []
        for row, instance in zip(environments.rows, environments.instances, strict=True):
            name = self._name_of(row)
            if self.is_routed:
                check_environment_name(name, self._factories, "a row")
            environment = ToolEnvironment(
                *(self._functions(name, instance), self._tools.keys(), self._schemas[name], instance),
                *(self.runner, self._max_iterations, counts, results),
            )
            started.append((environment, self._columns(row)))
        self._opened.update({id(each.instance): each.instance for each, _ in started})
        return started

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `reset` for a row."""
        return {key: value for key, value in row.items() if not (self.is_routed and key == "environment")}

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
                    reward = await call_for_number(self.runner.for_rewards, environment.get_reward)
                except EngineError:
                    raise
                except Exception as error:
                    self.add_metrics({"environments/failures": Metric(1.0, 1.0, "sum")})
                    warn_of_failure(environment, "get_reward", error)
                    conversation.has_failed = True
                    return None
            return _per_token(reward, conversation.turns, num_tokens)

        async def read_all(conversations: Sequence[Conversation], completion_ids: Sequence[list[int]]) -> list[Any]:
            own = {id(slot.instance) for name in names for slot in self._pool[name]}

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
        """Close the routes, and the environments that were opened and have a method `close`; log those that fail."""
        self.routes.close()
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
    except LowpeakError:
        raise
    except (Exception, SystemExit) as error:
        raise ArgumentError(
            f"{factory} raised {type(error).__name__}: {first_line(error)}; it is called without arguments (functools.partial "
            "adds some) and must return an environment."
        ) from error
    returned = "None" if instance is None else f"a {type(instance).__name__}"
    has_reset = callable(getattr(instance, "reset", None))
    require(has_reset, f"{factory} returns {returned}, which has no method reset: return an environment with one.")
    if drives(instance):
        _check_program(instance, factory)
    takes_text = not hasattr(instance, "respond") or _takes_text(instance.respond)
    require(
        takes_text, f"{factory} returns {returned}, whose respond does not take a text: define respond(self, text)."
    )
    return instance


def _check_program(instance: Any, factory: str) -> None:
    """Raise ArgumentError if `run` cannot be a program."""
    names = f"{factory} returns a {type(instance).__name__}, whose run"
    is_generator = inspect.isgeneratorfunction(instance.run) or inspect.isasyncgenfunction(instance.run)
    require(not is_generator, f"{names} is a generator: define async def run(self, endpoint) without yield.")
    signature = inspect.signature(instance.run)
    try:
        bound = signature.bind(None)
    except TypeError:
        bound = None
    kinds = {signature.parameters[name].annotation for name in bound.arguments} if bound is not None else {str}
    is_program = not any(getattr(kind, "__name__", kind) in _TOOL_TYPES for kind in kinds)
    require(
        is_program,
        f"{names}{signature} does not take an endpoint: a program is run(self, endpoint), and a tool has another name.",
    )


def _takes_text(respond: Any) -> bool:
    try:
        inspect.signature(respond).bind(text="")
    except TypeError:
        return False
    return True


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
