"""Calls to several engines at the same time, which Ctrl-C does not have to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from lowpeak.errors import StoppedError

Item = TypeVar("Item")

_LOOK_SECONDS = 0.2


def at_once(calls: Sequence[Callable[[], Item]]) -> list[Item]:
    """What the calls return, when all have ended; then the error of the first that failed.

    A single call is made in this thread, since its engine may be in this process. Others get threads that end with the process:
    an executor's would be waited for after Ctrl-C, by its block and at the process's end, for as long as a wave may take.
    """
    if len(calls) == 1:
        return [calls[0]()]
    futures = [_started(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


def unless(stopping: Callable[[], bool], call: Callable[[], Item]) -> Item:
    """What `call` returns, or raises; StoppedError when it still goes on, in a thread of its own, and `stopping()` is true."""
    future = _started(call)
    while not wait([future], _LOOK_SECONDS).done:
        if stopping():
            raise StoppedError("the run was asked to stop while it waited for a vLLM server.")
    return future.result()


def _started(call: Callable[[], Item]) -> Future[Item]:
    future: Future[Item] = Future()
    threading.Thread(target=_run, args=(call, future), name="lowpeak-vllm", daemon=True).start()
    return future


def _run(call: Callable[[], Item], future: Future[Item]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
