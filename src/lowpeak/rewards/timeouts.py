"""Calls of users' code with a time limit, and an event loop in a background thread."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

import torch


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
        future = asyncio.run_coroutine_threadsafe(coroutine, self._start())
        try:
            return _result(future, seconds)
        except TimeLimitExceeded:
            self._loop = None
            raise
        except BaseException:
            # Ctrl-C in the waiting thread ends the coroutine too.
            future.cancel()
            raise

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
            # A task that calls sys.exit ends `run_forever`; its waiters get the exception only if the loop runs again.
            with suppress(SystemExit):
                loop.run_forever()
                return
    finally:
        loop.close()
