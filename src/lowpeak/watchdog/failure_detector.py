"""The watch over a run's ranks: one that goes away or fails ends the others within seconds, with one sentence.

Every rank holds a TCP connection to rank 0. The kernel closes it when its process dies, however it dies, and probes for hosts
that are lost; so no step polls, and a rank that is only slow (a reward of ten minutes, a regular expression that holds the
interpreter) is never taken for a dead one. A rank tells rank 0 in which phase it is, at most four times a second; why it
fails; and that it is done. Rank 0 passes the first failure on as the verdict on the run.

A rank whose collective breaks raises RankError. One that hangs in it (NCCL does) or is busy with something else is ended, once
it had some seconds to end by itself. What living ranks do not come to is bounded by transformers' `ddp_timeout`.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lowpeak.errors import LowpeakError, RankError, first_line, show_controls
from lowpeak.ranks import Ranks, is_lost_connection, leave_at_exit
from lowpeak.watchdog.connections import Line, connect

logger = logging.getLogger(__name__)

GRACE = 5.0  # seconds that a rank has to end by itself once the verdict is known
_TICK = 0.25  # seconds between two looks of the watching thread at its own rank's phase
_GONE = "is gone (killed, or its host is lost)"


@dataclass(frozen=True)
class Verdict:
    """Why a run cannot go on: which rank is the reason, and what about it.

    `agreed` is on how many failures the ranks had agreed by then. One more, and this was it: all of them raise it, and whoever
    catches it goes on. A rank that is gone is nothing to agree on.
    """

    rank: int
    what: str
    agreed: float = float("inf")

    def sentence(self, rank: int, phase: str) -> str:
        """Return what `rank`, which is in `phase`, says of it."""
        if self.rank == rank:
            return f"rank {rank} {self.what}"
        return f"rank {self.rank} {self.what.rstrip('.')}. Rank {rank} was in {phase} and cannot go on without it."


@contextmanager
def watched(ranks: Ranks, phase: Callable[[], str], grace: float = GRACE) -> Iterator[None]:
    """Watch over the ranks during the block, which all of them enter; `phase` says where in the run this one is.

    RankError where another rank is gone, failed or does not answer; this rank's own failure ends the others. Nothing more for
    a single process, or inside such a block. After a block that succeeded, the process leaves its process group at its exit.
    """
    processes = ranks.processes
    lines = connect(processes) if processes.world_size > 1 and not ranks.is_watched else None
    with ExitStack() as stack:
        if lines is not None:
            watch = stack.enter_context(Watch(processes.rank, lines, phase, grace))
            stack.enter_context(ranks.alarmed(watch.announce, watch.withdraw))
        yield
    leave_at_exit()


class Watch:
    """One rank's end of the watch: a thread that listens to rank 0, or on rank 0 to everybody."""

    def __init__(self, rank: int, lines: list[Line], phase: Callable[[], str], grace: float = GRACE) -> None:
        self._rank = rank
        self._phase = phase
        self._grace = grace
        self._lines = {line.rank: line for line in lines}
        self._phases: dict[str, tuple[str, float]] = {}  # by rank; on rank 0 everybody's, with since when
        self._told = ""
        self._lock = threading.Lock()
        self._verdicts: list[Verdict] = []  # the first one counts
        self._agreed = 0
        self._concluded, self._answered, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._deadline = float("inf")
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="lowpeak-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        found: RankError | None = None
        if isinstance(error, Exception) and not isinstance(error, LowpeakError):
            found = self.explain(error)
        if error is not None and getattr(found or error, "rank", None) is None:
            self.announce(found or error)
        self._stopping.set()
        for line in list(self._lines.values()):
            line.send("bye")
        self._wake.close()
        self._thread.join(self._grace)
        for line in list(self._lines.values()):
            line.close()
        if found is not None:
            raise found from error

    def announce(self, error: BaseException) -> None:
        """Tell the others why this rank fails, and give it and them some seconds to end; the first to do so counts."""
        self._conclude(Verdict(self._rank, f"failed in {self._phase()}: {told(error)}", self._agreed))

    def withdraw(self) -> None:
        """Take back what was announced of a failure that the ranks have agreed on: it ends nobody who catches it."""
        with self._lock:
            self._agreed += 1
            self._verdicts = [each for each in self._verdicts if each.agreed >= self._agreed]
            if self._verdicts:
                self._deadline = time.monotonic() + self._grace
            else:
                self._deadline = float("inf")
                self._concluded.clear()

    def explain(self, error: Exception) -> RankError | None:
        """Return what a broken collective means; None for an error that has nothing to do with other ranks."""
        lost = is_lost_connection(error)
        self._concluded.wait(2 * self._grace if lost else 0.0)
        verdict = next(iter(self._verdicts), None)
        if verdict is not None and verdict.rank != self._rank:
            found = RankError(verdict.sentence(self._rank, self._phase()))
            logger.error("%s", found)  # at once: a launcher that saw the same will end this process in a moment
            found.rank = verdict.rank
            return found
        if not lost:
            return None
        words = first_line(error)
        return RankError(
            f"no answer from the other ranks in {self._phase()}, though all are alive or stopped ({self._everybody()}): {words}. "
            "Where one only takes long, raise ddp_timeout."
        )

    # the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for line in self._lines.values():
                selector.register(line.connection, selectors.EVENT_READ, line)
            while not self._stopping.is_set():
                self._tell_phase()
                for key, _ in selector.select(max(0.0, min(_TICK, self._deadline - time.monotonic()))):
                    if key.data is not None and not self._listen(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= self._deadline and not self._stopping.is_set():
                    self._end()
        self._woken.close()

    def _tell_phase(self) -> None:
        now = self._phase()
        if now == self._told:
            return
        self._told = now
        self._phases[str(self._rank)] = (now, time.monotonic())
        if self._rank != 0:
            self._to_first("phase", now)

    def _listen(self, line: Line) -> bool:
        """Take a line's messages; return whether there may come more."""
        try:
            messages = line.receive()
        except EOFError:
            if not self._stopping.is_set() and line.rank in self._lines:
                last = self._phases.get(str(line.rank))
                self._conclude(Verdict(line.rank, f"{_GONE}; it was last seen in {last[0]}" if last else _GONE))
            return False
        return all([self._take(line, *message) for message in messages])

    def _take(self, line: Line, kind: str, *values: Any) -> bool:
        """Act on a message; return whether there may come more."""
        if kind == "bye":
            self._lines.pop(line.rank, None)
            return False
        if kind == "phase":
            self._phases[str(line.rank)] = (values[0], time.monotonic())
        elif kind == "where":
            line.send("phases", {rank: (phase, time.monotonic() - at) for rank, (phase, at) in self._phases.items()})
        elif kind == "phases":
            self._phases = {rank: (phase, time.monotonic() - ago) for rank, (phase, ago) in values[0].items()}
            self._answered.set()
        elif kind == "verdict":
            self._conclude(Verdict(*values))
        return True

    def _conclude(self, verdict: Verdict) -> None:
        """Keep the verdict and pass it on; the first one starts the time that this rank has left."""
        own = verdict.rank == self._rank  # the others are told first, and may need their time to agree
        with self._lock:
            if verdict.agreed < self._agreed or verdict in self._verdicts:
                return
            if not self._verdicts:
                self._deadline = time.monotonic() + self._grace * (2 if own else 1)
            self._verdicts.append(verdict)
        message = ("verdict", verdict.rank, verdict.what, verdict.agreed)
        if self._rank == 0:
            for line in list(self._lines.values()):
                line.send(*message)
        elif own:
            self._to_first(*message)
        self._concluded.set()

    def _to_first(self, *message: Any) -> None:
        line = self._lines.get(0)
        if line is not None:
            line.send(*message)

    def _end(self) -> None:
        """End a process that hangs or is busy: no exception would reach it."""
        verdict = next(iter(self._verdicts), None)
        if verdict is None:  # withdrawn at the last moment
            return
        # A progress bar leaves its line open.
        print(f"\nlowpeak: error: {verdict.sentence(self._rank, self._phase())}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)

    def _everybody(self) -> str:
        """Return where each of the other ranks is, as far as rank 0 knows."""
        if self._rank != 0:
            self._to_first("where")
            self._answered.wait(2.0)
        now = time.monotonic()
        others = sorted((int(rank), seen) for rank, seen in self._phases.items() if int(rank) != self._rank)
        return "; ".join(f"rank {rank} is in {phase} for {now - at:.0f} s" for rank, (phase, at) in others) or (
            "where is not known"
        )


def told(error: BaseException) -> str:
    """Return an error in one line, with its class where it is not lowpeak's."""
    if isinstance(error, LowpeakError):
        return str(error)
    return show_controls(f"{type(error).__name__}: {error}".rstrip(": "))
