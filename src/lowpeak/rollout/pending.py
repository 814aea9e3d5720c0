"""A wave of prompts that an engine has accepted, whose completions may not exist yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Protocol, runtime_checkable

from lowpeak.errors import LostEngineError, StoppedError
from lowpeak.records import Group

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_INTERRUPT_SECONDS = 3.0


@runtime_checkable
class Pending(Protocol):
    """The groups of one `RolloutEngine.submit`, complete or not; only the thread that submitted calls its methods."""

    def result(self) -> list[Group]:
        """Wait for the groups and return them in the order of the prompts; a later call returns the same ones.

        After a LostEngineError and a `load`, the next call requests only the completions that are missing.
        """

    def abort(self) -> None:
        """Drop the groups and stop work on them; the engine can `load` afterwards. It must not raise."""


@runtime_checkable
class BackgroundPending(Pending, Protocol):
    """Groups that a thread waits for from `submit` on.

    `seconds` is how long they took, once they are complete; `results` are those of the functions that conversations called.
    """

    @property
    def seconds(self) -> float: ...

    @property
    def results(self) -> Mapping[str, Mapping[str, Any]]: ...

    @property
    def is_running(self) -> bool:
        """Whether the thread still waits."""

    def wait(self) -> None:
        """Wait for the thread's end; StoppedError if the run must end. A lost engine raises in `result`, not here."""

    def stop(self) -> None:
        """Stop the thread within seconds; what is complete stays."""

    def finished(self) -> list[Group]:
        """Return the groups that are complete so far."""


class GeneratedOnResult:
    """Groups of an engine that generates while its caller waits in `result`."""

    def __init__(self, generate: Callable[[], list[Group]]) -> None:
        self._generate = generate
        self._groups: list[Group] | None = None

    def result(self) -> list[Group]:
        if self._groups is None:
            self._groups = self._generate()
        return self._groups

    def abort(self) -> None:
        self._groups = None


class BackgroundEngine(Protocol):
    """The part of an engine that work in the background uses."""

    @property
    def in_background(self) -> bool:
        """Whether a thread waits for the engine's answers."""

    def deadline(self) -> float:
        """Return the time on the monotonic clock at which a wait for the work ends."""

    def interrupt(self) -> None:
        """Abort all requests of the engine."""

    def forget_weights(self) -> None:
        """Drop the version of the weights, so that the next push replaces them."""


class BackgroundWork:
    """Work for a wave in a daemon thread; the wave's owner calls the methods, in its own thread.

    work.start(prepare)      # prepare() returns what runs in the thread
    work.wait()
    work.raise_error()       # then it may start again

    What runs returns the error of an engine that was lost, if others did its part. `seconds` is how long the last one took.
    """

    def __init__(self, engine: BackgroundEngine) -> None:
        self._engine = engine
        self._future: Future[LostEngineError | None] | None = None
        self.seconds = 0.0

    def start(self, prepare: Callable[[], Callable[[], LostEngineError | None]]) -> None:
        """Start what `prepare` returns; `raise_error` raises a LostEngineError of `prepare` itself."""
        self._future = Future()
        try:
            run = prepare()
        except LostEngineError as error:
            self._future.set_exception(error)
            return
        _start_thread(self._timed(run), self._future)

    def _timed(self, run: Callable[[], LostEngineError | None]) -> Callable[[], LostEngineError | None]:
        began = time.perf_counter()

        def timed() -> LostEngineError | None:
            try:
                return run()
            finally:
                self.seconds = time.perf_counter() - began

        return timed

    @property
    def is_started(self) -> bool:
        return self._future is not None

    @property
    def is_running(self) -> bool:
        return self._future is not None and not self._future.done()

    def wait(self) -> None:
        """Wait for the end; raise StoppedError at the engine's deadline."""
        while self._future is not None and not wait([self._future], _POLL_SECONDS).done:
            if time.monotonic() > self._engine.deadline():
                raise StoppedError("the run was stopped while its rollouts were generated.")

    def stop(self) -> None:
        """End the work within seconds."""
        if self._future is not None and self.is_running:
            _start_thread(self._engine.interrupt, Future())
            wait([self._future], _INTERRUPT_SECONDS)

    def raise_error(self) -> None:
        """Raise the work's error, after which it can start again. A lost engine gets weights in the next push."""
        future, self._future = self._future, None
        assert future is not None, "work is started before its end is taken"
        try:
            lost = future.result()
        except LostEngineError:
            self._engine.forget_weights()
            raise
        if lost is not None:
            logger.warning("%s Others of its group have generated its completions.", lost)
            self._engine.forget_weights()

    def discard_result(self) -> None:
        """Drop the result of a run that has ended."""
        self._future = None


def _start_thread(call: Callable[[], Any], future: Future[Any]) -> None:
    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lowpeak-rollout", daemon=True).start()
