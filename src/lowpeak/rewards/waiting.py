"""Waiting for users' code without being held by it: a call with a limit, and an event loop beside the run."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch


class Late(Exception):
    """The call has not returned within its limit; not a `TimeoutError`, which the call itself may raise."""


def call_within(call: Callable[[], Any], seconds: float | None) -> Any:
    """Return `call()` of a daemon thread with the caller's context variables.

    Raises Late if it has not returned after `seconds`; its thread is left behind.
    """
    outcome: Future[Any] = Future()
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(_settle, outcome, call, _device()), name="lowpeak-reward", daemon=True
    )
    thread.start()
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
            threading.Thread(
                target=_serve, args=(self._loop, _device()), name="lowpeak-reward-loop", daemon=True
            ).start()
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return self._loop


def _result(future: Future[Any], seconds: float | None) -> Any:
    try:
        return future.result(seconds)
    except FutureTimeoutError:
        if future.done():
            return future.result()  # at the last moment, or it is the call's own error
        raise Late from None


def _device() -> int | None:
    """Return the device that code without an index runs on, which is set for each thread; None if none is used."""
    return torch.accelerator.current_device_index() if torch.cuda.is_initialized() else None


def _enter(device: int | None) -> None:
    if device is not None:
        torch.accelerator.set_device_index(device)


def _settle(outcome: Future[Any], call: Callable[[], Any], device: int | None) -> None:
    try:
        _enter(device)
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)


def _serve(loop: asyncio.AbstractEventLoop, device: int | None) -> None:
    _enter(device)
    asyncio.set_event_loop(loop)
    try:
        while not _run_until_stopped(loop):
            pass
    finally:
        loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> bool:
    """Run the loop; return False if a task called sys.exit: its waiters get the exception only if the loop runs again."""
    try:
        loop.run_forever()
    except SystemExit:
        return False
    return True
