"""Seconds without the time in which the machine ran something else, for tests of processes that must end in time."""

from __future__ import annotations

import threading
import time
from typing import Self

_TICK = 0.02


class Stopwatch:
    """Measure a block in `seconds`; a tick that the scheduler delayed counts as one tick.

    On an idle machine this is the wall clock, within a few percent.
    """

    def __enter__(self) -> Self:
        self.seconds = 0.0
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, daemon=True)
        self._ticking.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._ticking.join()

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(_TICK):
            now = time.monotonic()
            self.seconds += min(now - before, 2 * _TICK)
            before = now
