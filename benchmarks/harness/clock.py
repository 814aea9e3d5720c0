"""CPU seconds by phase: some of a trainer's methods are timed where they are called, on both sides in the same way."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

REST = "rest"  # what no phase takes


class PhaseClock:
    """CPU seconds of the process by phase; a phase that is entered inside another is not the outer one's time.

    `events` are the changes of phase by the system's monotonic clock, which a watching process reads as well.
    """

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self.seconds: dict[str, float] = {}
        self.events: list[tuple[float, str]] = []
        self._now = now
        self._open: list[str] = []
        self._since = 0.0

    @property
    def current(self) -> str:
        """The phase that runs now."""
        return self._open[-1] if self._open else REST

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the block takes as `name`."""
        self._credit()
        self._open.append(name)
        self._changed()
        try:
            yield
        finally:
            self._credit()
            self._open.pop()
            self._changed()

    def watch(self, owner: Any, method: str, name: str, when: Callable[[], bool] = lambda: True) -> None:
        """Count each call of `owner.method` as `name`, where `when` holds as it is called."""
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not when():
                return inner(*args, **kwargs)
            with self.phase(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def _changed(self) -> None:
        self.events.append((time.monotonic(), self.current))

    def _credit(self) -> None:
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def watch_step(trainer: Any, library: str, clock: PhaseClock) -> None:
    """Time all phases of a step: `rollout`, `reward`, `score` (no-grad log-probs), `train`, `optimizer` (ours alone).

    lowpeak names its phases itself, to its memory tracker; of TRL the methods that do each are timed.
    """
    if library == "lowpeak":
        _follow_tracker(trainer.run.tracker, clock)
        return
    clock.watch(trainer, "_generate", "rollout")
    clock.watch(trainer, "_calculate_rewards", "reward")
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "score", when=lambda: not torch.is_grad_enabled())
    clock.watch(trainer, "compute_loss", "train")
    clock.watch(trainer.accelerator, "backward", "train")


def _follow_tracker(tracker: Any, clock: PhaseClock) -> None:
    inner = tracker.phase

    @contextmanager
    def phase(name: Any) -> Iterator[None]:
        with clock.phase(str(name.value)), inner(name):
            yield

    tracker.phase = phase
