"""Calls of tools off the engine's thread, with a time limit and bounded threads."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from lowpeak.errors import EngineError

_MOST_PROGRAMS = 4096  # at once


class ToolTimeoutError(Exception):
    """A call that did not return within its time limit."""


def text_of(error: BaseException) -> str:
    """Return an error's message; the name of its class if it has none, or if `__str__` fails."""
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise RuntimeError in place of exceptions that end the event loop or the run, such as those of `sys.exit()`."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if _is_ended_by_loop(error):
            raise
        raise RuntimeError(text_of(error)) from error


def _is_ended_by_loop(error: BaseException) -> bool:
    """Return whether the task is cancelled, or its coroutine closed because its loop has ended."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs
        return True
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class ToolRunner:
    """Runs functions on the event loop of its caller (`async def`), or in at most `num_threads` daemon threads.

    An awaitable that a function returns is awaited, too. A call that exceeds `timeout` seconds is cancelled. Python cannot stop a
    thread: it is abandoned, and more than `num_threads` abandoned ones that still run end the run.
    """

    def __init__(self, timeout: float | None, num_threads: int = 32) -> None:
        self._timeout, self._num_threads = timeout, num_threads
        self._threads = asyncio.Semaphore(num_threads)
        self._abandoned: list[Future[Any]] = []

    @cached_property
    def for_rewards(self) -> ToolRunner:
        """A runner with threads of its own, so that rewards do not wait for the calls of rollouts ahead."""
        runner = copy.copy(self)
        runner._threads = asyncio.Semaphore(self._num_threads)
        return runner

    @cached_property
    def for_programs(self) -> ToolRunner:
        """A runner of programs that drive conversations: each may have a thread, and its conversation limits its time."""
        runner = copy.copy(self)
        runner._timeout, runner._threads = None, asyncio.Semaphore(_MOST_PROGRAMS)
        return runner

    @property
    def num_abandoned(self) -> int:
        """The abandoned threads that still run."""
        return sum(not future.done() for future in self._abandoned)

    async def run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Return `function(**arguments)`; ToolTimeoutError if it takes too long, EngineError if too many threads hang."""
        call = partial(function, **arguments)
        result = call() if inspect.iscoroutinefunction(function) else await self._in_thread(call)
        return await self._limited(result) if inspect.isawaitable(result) else result

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        async with self._threads:
            future = _start(call)
            try:
                return await self._limited(asyncio.shield(asyncio.wrap_future(future)))
            except asyncio.CancelledError:
                self._abandoned.append(future)
                raise
            except ToolTimeoutError:
                self._abandoned[:] = [each for each in (*self._abandoned, future) if not each.done()]
                if self.num_abandoned > self._num_threads:
                    raise EngineError(
                        f"{self.num_abandoned} calls of tools exceeded tool_timeout={self._timeout} and still run in their "
                        "threads: make the tools end by themselves, or set tool_isolation='process'."
                    ) from None
                raise

    async def _limited(self, awaitable: Any) -> Any:
        task = asyncio.ensure_future(_guarded(awaitable))
        try:
            await asyncio.wait({task}, timeout=self._timeout)
        finally:
            is_late = not task.done()
            task.cancel()  # one that goes on all the same is not waited for
        if is_late:
            raise ToolTimeoutError(f"no result within {self._timeout:g} seconds")
        return task.result()


async def _guarded(awaitable: Any) -> Any:
    with exits_as_errors():
        return await awaitable


def _start(call: Callable[[], Any]) -> Future[Any]:
    """Run the call in a daemon thread, which does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            # A future of asyncio takes no StopIteration: whoever awaits it would wait for ever.
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if is_plain else RuntimeError(text_of(error)))

    threading.Thread(target=run, name="lowpeak-tool", daemon=True).start()
    return future
