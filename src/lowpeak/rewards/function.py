"""A reward that is a function: sync, async or a callable object, called as TRL calls it, within a time limit.

Unlike TRL, a function without `**kwargs` is passed only the keywords that it names.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lowpeak.errors import ArgumentError, RewardError, RewardTimeoutError
from lowpeak.rewards.timeouts import Late, call_within


class FunctionReward:
    """A user's function as a `Reward`, named after the function or after its object's class.

    `timeout` bounds one call in seconds. A late sync function is left behind in a daemon thread, since Python cannot
    stop it; code that never lets go of the interpreter (one long regular expression) is noticed only when it ends.

    Raises:
        RewardTimeoutError: the call took longer than `timeout`.
        RewardError: the function asks for a parameter that is neither in the contract nor a column.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, timeout: float | None = None) -> None:
        if not callable(function) or inspect.isclass(function):
            raise ArgumentError(f"A reward must be a function or a callable object, not {function!r}.")
        self.function = function
        self.name = name or callable_name(function)
        self.timeout = timeout
        self.is_async = _is_async(function)
        self._named, self._required = _parameters(function)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[list[int]], **columns: Any
    ) -> Any:
        """Return what the function returns, unchecked."""
        keywords = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        if self.is_async:
            # In a thread of its own, because this thread may have a running loop, which cannot be entered twice.
            return call_within(lambda: asyncio.run(self.call_async(**keywords)), None)
        call = functools.partial(self.function, **self._keywords(keywords))
        if self.timeout is None:
            return call()
        try:
            return call_within(call, self.timeout)
        except Late:
            raise self._late() from None

    async def call_async(self, **keywords: Any) -> Any:
        """Await an async function inside a running loop, so that several can wait together."""
        passed = self._keywords(keywords)
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await self.function(**passed)
        except TimeoutError:
            if limit.expired():
                raise self._late() from None
            raise  # the function's own

    def _keywords(self, keywords: dict[str, Any]) -> dict[str, Any]:
        missing = sorted(self._required - keywords.keys())
        if missing:
            raise RewardError(
                f"Reward '{self.name}' asks for {', '.join(missing)}, which the data set has no column for; "
                f"it can have {', '.join(sorted(keywords))}."
            )
        if self._named is None:
            return keywords
        return {key: value for key, value in keywords.items() if key in self._named}

    def _late(self) -> RewardTimeoutError:
        return RewardTimeoutError(
            f"Reward '{self.name}' did not return within its time limit of {self.timeout:g} seconds."
        )


def callable_name(function: Callable[..., Any]) -> str:
    """Return `__name__`, else the class's name; a `functools.partial` has the name of what it wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call makes a coroutine; an object carries the `async` on its `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Return the keywords that a function takes (None: all) and those it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin may have no signature
        return None, frozenset()
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = frozenset(p.name for p in keywords if p.default is p.empty)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None, required
    return frozenset(p.name for p in keywords), required
