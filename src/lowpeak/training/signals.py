"""Requests to stop: the first Ctrl-C or SIGTERM finishes the step and saves, a second Ctrl-C stops at once.

Launchers pass signals on to all ranks, which may be in different steps then: the ranks agree at the end of a step.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 20.0  # a launcher kills a process 30 s after its SIGTERM
STOP_FLAGS = ("should_training_stop", "should_epoch_stop")
CONTROL_FLAGS = (*STOP_FLAGS, "should_log", "should_evaluate", "should_save")


class Interrupts:
    """Handlers of SIGINT and SIGTERM while a run trains, in the main thread only.

    stopping    this rank was asked to stop
    agreed      some rank was asked to stop, which all ranks learn at the end of a step
    deadline    after SIGTERM, until when the run may wait for completions, on the monotonic clock
    """

    def __init__(self) -> None:
        self.stopping = False
        self.agreed = False
        self.deadline = math.inf

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle both signals in the block, and restore their handlers after it."""
        self.stopping, self.agreed, self.deadline = False, False, math.inf
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # SIGTERM may come twice, from a scheduler and from the launcher in between: only Ctrl-C stops at once.
        if signum == signal.SIGTERM:
            self.deadline = min(self.deadline, time.monotonic() + _WAIT_SECONDS)
        if not self.stopping:
            self.stopping = True
            reason, again = "Interrupted", "press Ctrl-C again"
            if signum == signal.SIGTERM:
                reason, again = "Asked to stop (SIGTERM)", f"send SIGINT (Ctrl-C, or kill -INT {os.getpid()})"
            logger.warning("%s: finishing this step and saving; %s to stop at once.", reason, again)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def raise_if_stopped(self, output_dir: Path, step: int) -> None:
        """Raise KeyboardInterrupt, with how to resume, if the run was asked to stop."""
        if not self.agreed:
            return
        saved = output_dir / f"checkpoint-{step}"
        if not step:
            raise KeyboardInterrupt("stopped on request before the first step; there was nothing to save.")
        if not saved.is_dir():  # the request came after the last step, so no step was left to save at its end
            raise KeyboardInterrupt(f"stopped on request after the run's last step, {step}.")
        raise KeyboardInterrupt(
            f"stopped on request; everything is saved in {saved}. Resume with resume_from_checkpoint=True "
            "(--resume_from_checkpoint true)."
        )


def agree_on_flags(control: Any, names: Sequence[str], ranks: Ranks) -> None:
    """Set each flag of transformers' control on every rank if a callback set it on one: saving takes all ranks."""
    flags = ranks.max([float(getattr(control, name)) for name in names])
    for name, is_set in zip(names, flags, strict=True):
        if is_set:
            setattr(control, name, True)
