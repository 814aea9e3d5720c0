"""Seconds without the time in which the scheduler gave no core, for tests of processes that must end in time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Self

_TICK = 0.02


class Stopwatch:
    """Measure a block in `seconds`, less the time in which a ticking thread was ready to run and got no core (Linux).

    On an idle machine this is the wall clock. Waiting for the interpreter's lock counts, so code that blocks it is seen.
    """

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, daemon=True)
        self._ticking.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._ticking.join()

    def _tick(self) -> None:
        began, waited = time.monotonic(), _seconds_without_core()
        while not self._ended.wait(_TICK):
            pass
        self.seconds = time.monotonic() - began - (_seconds_without_core() - waited)


def _seconds_without_core() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
