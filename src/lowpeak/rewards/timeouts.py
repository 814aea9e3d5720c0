"""Waiting for users' code without being held by it: a call with a limit, and an event loop beside the run."""

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


class Late(Exception):
    """The call has not returned within its limit; not a `TimeoutError`, which the call itself may raise."""


def call_within(call: Callable[[], Any], seconds: float | None) -> Any:
    """Return `call()` of a daemon thread with the caller's context variables.

    Raises Late if it has not returned after `seconds`; its thread is left behind.
    """
    outcome: Future[Any] = Future()

    def settle() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    _start_thread(functools.partial(contextvars.copy_context().run, settle), "lowpeak-reward")
    return _result(outcome, seconds)


class BackgroundLoop:
    """An event loop in a daemon thread, started when it is first used and kept for the next calls.

    Kept, because clients (HTTP pools, locks) belong to the loop that made them; in a thread, because the caller's own
    may have a running loop, as in a notebook.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float | None = None) -> Any:
        """Return the coroutine's result; Late if one has blocked the loop for `seconds`: the next call gets a new loop."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._started())
        try:
            return _result(future, seconds)
        except Late:
            self._loop = None
            raise
        except BaseException:  # Ctrl-C in the waiting thread ends the coroutine too
            future.cancel()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            _start_thread(functools.partial(_serve, self._loop), "lowpeak-reward-loop")
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return self._loop


def _result(future: Future[Any], seconds: float | None) -> Any:
    try:
        return future.result(seconds)
    except FutureTimeoutError:
        if future.done():
            return future.result()  # at the last moment, or it is the call's own error
        raise Late from None


def _start_thread(run: Callable[[], None], name: str) -> None:
    """Start a daemon thread on the caller's device: which one code without an index runs on is set for each thread."""
    device = torch.accelerator.current_device_index() if torch.cuda.is_initialized() else None

    def enter() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)
        run()

    threading.Thread(target=enter, name=name, daemon=True).start()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped; if a task called sys.exit, its waiters get the exception only if the loop runs again."""
    asyncio.set_event_loop(loop)
    try:
        while True:
            with suppress(SystemExit):
                loop.run_forever()
                return
    finally:
        loop.close()
