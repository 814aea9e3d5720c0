"""Function rewards: sync or async callables, called as in TRL, with a time limit.

Unlike in TRL, a function without `**kwargs` gets only the keywords that it names. Async functions run in the event loop of a
background thread."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

import torch

from lowpeak.data import REWARD_KEYWORDS
from lowpeak.errors import ArgumentError, RewardError, RewardTimeoutError


class FunctionReward:
    """A user's function as a `Reward`, named after the function or its object's class.

    `timeout` bounds one call, in seconds. A sync function that exceeds it goes on in a daemon thread, because Python
    cannot stop it. Code that does not release the interpreter (one long regular expression) is noticed only when it ends.

    Raises:
        RewardTimeoutError: the call took longer than `timeout`.
        RewardError: the function has a parameter that is neither in the contract nor a column.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, timeout: float | None = None) -> None:
        if not callable(function) or inspect.isclass(function):
            raise ArgumentError(f"A reward must be a function or a callable object, got {function!r}.")
        self.function = function
        self.name = name or callable_name(function)
        self.timeout = timeout
        self.is_async = _is_async(function)
        self.parameters, self._required, self._accepts_all = _parameters(function)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[list[int]], **columns: Any
    ) -> Any:
        """Return the function's values, unchecked."""
        keywords = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        if self.is_async:
            # In a separate thread, because this thread may have a running loop, which cannot be entered twice.
            return call_with_timeout(lambda: asyncio.run(self.call_async(**keywords)), None)
        call = functools.partial(self.function, **self._select_keywords(keywords))
        if self.timeout is None:
            return call()
        try:
            return call_with_timeout(call, self.timeout)
        except TimeLimitExceeded:
            raise self._timeout_error() from None

    async def call_async(self, **keywords: Any) -> Any:
        """Await the async function in the running loop, concurrently with others."""
        selected = self._select_keywords(keywords)
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await self.function(**selected)
        except TimeoutError:
            if limit.expired():
                raise self._timeout_error() from None
            # The function itself raised it.
            raise

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise RewardError for a parameter that is no column, and a built-in reward's errors without completions."""
        keywords = self._select_keywords(dict.fromkeys([*columns, *REWARD_KEYWORDS], ()))
        if getattr(self.function, "__module__", "") == f"{__package__}.builtin":
            self.function(**keywords)

    def _select_keywords(self, keywords: dict[str, Any]) -> dict[str, Any]:
        missing = sorted(self._required - keywords.keys())
        if missing:
            raise RewardError(
                f"Reward '{self.name}' has the parameters {', '.join(missing)}, but the dataset has no such columns: "
                f"rename them or add the columns. Available are {', '.join(sorted(keywords))}."
            )
        if self._accepts_all:
            return keywords
        return {key: value for key, value in keywords.items() if key in self.parameters}

    def _timeout_error(self) -> RewardTimeoutError:
        return RewardTimeoutError(
            f"Reward '{self.name}' did not return within its time limit of {self.timeout:g} seconds: make it faster, or "
            "raise reward_timeout."
        )


def callable_name(function: Callable[..., Any]) -> str:
    """Return `__name__`, else the class's name; of a `functools.partial`, that of the wrapped function."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    # A callable object is async if its `__call__` is.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str], frozenset[str], bool]:
    """Return the keywords that a function names, those that it requires, and whether it accepts all."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # A builtin may have no signature.
        return frozenset(), frozenset(), True
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = frozenset(p.name for p in keywords if p.default is p.empty)
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return frozenset(p.name for p in keywords), required, accepts_all


class TimeLimitExceeded(Exception):
    """A call that did not return within its limit.

    It is not a `TimeoutError`, because the call itself may raise one.
    """


def call_with_timeout(call: Callable[[], Any], seconds: float | None) -> Any:
    """Return `call()`, run in a daemon thread with the caller's context variables.

    Raises TimeLimitExceeded if the call has not returned after `seconds`; its thread goes on.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    _start_thread(functools.partial(contextvars.copy_context().run, run), "lowpeak-reward")
    return _result(outcome, seconds)


class BackgroundLoop:
    """An event loop in a daemon thread, started on first use and kept for later calls.

    It is kept because clients (HTTP pools, locks) belong to the loop that made them. It has a thread because the caller's
    thread may have a running loop, as in a notebook.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float | None = None) -> Any:
        """Return the coroutine's result.

        Raises TimeLimitExceeded if it has blocked the loop for `seconds`; the next call then gets a new loop.
        """
        future = self.submit(coroutine)
        try:
            return _result(future, seconds)
        except TimeLimitExceeded:
            self._loop = None
            raise
        except BaseException:
            # Ctrl-C in the waiting thread ends the coroutine too.
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Return the coroutine's future result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._start())

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            _start_thread(functools.partial(_run_forever, self._loop), "lowpeak-reward-loop")
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return self._loop


def _result(future: Future[Any], seconds: float | None) -> Any:
    try:
        return future.result(seconds)
    except FutureTimeoutError:
        if future.done():
            # It returned at the last moment, or the timeout is the call's error.
            return future.result()
        raise TimeLimitExceeded from None


def _start_thread(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread whose current device is the caller's."""
    # The current device is per thread, and code without a device index runs on it.
    device = torch.accelerator.current_device_index() if torch.cuda.is_initialized() else None

    def enter() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)
        run()

    threading.Thread(target=enter, name=name, daemon=True).start()


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then close it."""
    asyncio.set_event_loop(loop)
    try:
        while True:
            # These end `run_forever` if a task raises them; its waiters get the exception only if the loop runs again.
            with suppress(KeyboardInterrupt, SystemExit):
                loop.run_forever()
                return
    finally:
        loop.close()
