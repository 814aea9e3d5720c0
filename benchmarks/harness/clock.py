"""CPU seconds by phase: some of a trainer's methods are timed where they are called, on both sides in the same way."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class PhaseClock:
    """CPU seconds of the process by phase; a phase that is entered inside another is not the outer one's time."""

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the block takes as `name`."""
        self._credit()
        self._open.append(name)
        try:
            yield
        finally:
            self._credit()
            self._open.pop()

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count each call of `owner.method` as `name`."""
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def _credit(self) -> None:
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def watch_phases(trainer: Any, library: str, clock: PhaseClock) -> None:
    """Time generation (`rollout`), rewards (`reward`), and forward with backward (`train`) of either trainer.

    What remains of a run is the optimizer, advantages, logs and the loop itself.
    """
    if library == "lowpeak":
        clock.watch(trainer.maker.engine, "generate", "rollout")
        clock.watch(trainer.maker.panel, "judge", "reward")
        clock.watch(trainer, "training_step", "train")
    else:
        clock.watch(trainer, "_generate", "rollout")
        clock.watch(trainer, "_calculate_rewards", "reward")
        clock.watch(trainer, "compute_loss", "train")
        clock.watch(trainer.accelerator, "backward", "train")
