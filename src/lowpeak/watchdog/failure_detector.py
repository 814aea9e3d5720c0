"""Failure detection across ranks: after one rank dies or fails, the others end within seconds and name it.

Every rank has a TCP connection to rank 0 (`connections`) and a thread that listens to it. The kernel closes the connection when
a process dies, so a slow rank (a reward of ten minutes, a regular expression that blocks the interpreter) is never taken for a
dead one. A rank sends rank 0 its phase when it changes, at most four times a second, its error if it fails, and "bye" when it
is done. Rank 0 forwards the first failure to all, as the verdict on the run.

A rank whose collective fails raises RankError with the verdict. A rank that hangs in a collective (NCCL does) or is busy is
ended by its thread after a grace period. Ranks that are alive and do not arrive at a collective are left to its timeout,
transformers' `ddp_timeout`.

Messages (JSON lists): ["phase", name], ["where"], ["phases", {rank: [name, seconds]}], ["verdict", rank, reason, num_agreed],
["bye"].
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
from lowpeak.ranks import Ranks, destroy_group_at_exit, is_lost_connection, nccl_memory_error
from lowpeak.watchdog.connections import RankConnection, connect

logger = logging.getLogger(__name__)

GRACE = 5.0  # seconds that a rank has to end by itself after a verdict
_POLL_SECONDS = 0.25  # between two reads of this rank's phase
_GONE = "is gone (killed, or its host is lost)"


@dataclass(frozen=True)
class Verdict:
    """Why a run cannot continue: the rank that failed, and the reason.

    `num_agreed` is the number of failures that the ranks had agreed on before. When they agree on one more, it is this one: all
    ranks raise it, and a caller that catches it may continue. Infinity for a rank that is gone: ranks cannot agree on that.
    """

    rank: int
    reason: str
    num_agreed: float = float("inf")

    def describe(self, rank: int, phase: str) -> str:
        """Return the message of `rank`, which is in `phase`."""
        if self.rank == rank:
            return f"rank {rank} {self.reason}"
        return f"rank {self.rank} {self.reason.rstrip('.')}. Rank {rank} was in {phase} and cannot go on without it."


@contextmanager
def detect_failures(ranks: Ranks, phase: Callable[[], str], grace: float = GRACE) -> Iterator[None]:
    """Detect failures of the other ranks during the block, and report this rank's; all ranks must enter it.

    `phase` returns where in the run this rank is. Raises RankError if another rank is gone, failed or does not answer. Does
    nothing in a single process, or inside another such block. After a successful block the process group is destroyed when
    Python exits.
    """
    processes = ranks.processes
    connections = connect(processes) if processes.world_size > 1 and not ranks.reports_errors else None
    with ExitStack() as stack:
        if connections is not None:
            detector = stack.enter_context(FailureDetector(processes.rank, connections, phase, grace))
            stack.enter_context(ranks.report_errors(detector.announce, detector.withdraw))
        yield
    destroy_group_at_exit()


class FailureDetector:
    """One rank's failure detector: a thread that listens to rank 0, or on rank 0 to all ranks."""

    def __init__(
        self, rank: int, connections: list[RankConnection], phase: Callable[[], str], grace: float = GRACE
    ) -> None:
        self._rank = rank
        self._phase = phase
        self._grace = grace
        self._connections = {connection.rank: connection for connection in connections}
        self._phases: dict[str, tuple[str, float]] = {}  # by rank, with the time it began; of all ranks only on rank 0
        self._sent_phase = ""
        self._lock = threading.Lock()
        self._verdicts: list[Verdict] = []  # the first one is the run's
        self._num_agreed = 0
        # A verdict is known; rank 0 has sent all phases; the block has ended.
        self._concluded, self._phases_known, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._deadline = float("inf")  # when the thread ends this process
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="lowpeak-watch", daemon=True)

    def __enter__(self) -> FailureDetector:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        explained: RankError | None = None
        if isinstance(error, Exception) and not isinstance(error, LowpeakError):
            explained = self.explain(error)
        # An error with a rank is another rank's, which has announced it.
        if error is not None and getattr(explained or error, "rank", None) is None:
            self.announce(explained or error)
        self._stopping.set()
        for connection in list(self._connections.values()):
            connection.send("bye")
        self._wake_sender.close()
        self._thread.join(self._grace)
        for connection in list(self._connections.values()):
            connection.close()
        if explained is not None:
            raise explained from error

    def announce(self, error: BaseException) -> None:
        """Send this rank's error to the others, and start the grace period. The first announced error counts.

        A lost connection is another rank's failure, which `explain` finds, and is not sent.
        """
        if not isinstance(error, LowpeakError) and is_lost_connection(error):
            return
        self._conclude(Verdict(self._rank, f"failed in {self._phase()}: {error_text(error)}", self._num_agreed))

    def withdraw(self) -> None:
        """Cancel the verdict on an error that all ranks have agreed on. A caller may catch it and continue."""
        with self._lock:
            self._num_agreed += 1
            self._verdicts = [each for each in self._verdicts if each.num_agreed >= self._num_agreed]
            if self._verdicts:
                self._deadline = time.monotonic() + self._grace
            else:
                self._deadline = float("inf")
                self._concluded.clear()

    def explain(self, error: Exception) -> RankError | None:
        """Return a RankError that explains a failed collective; None for an error that no collective caused."""
        nccl_error = nccl_memory_error(error)
        if nccl_error is not None:
            return nccl_error
        lost = is_lost_connection(error)
        self._concluded.wait(2 * self._grace if lost else 0.0)
        verdict = next(iter(self._verdicts), None)
        if verdict is not None and verdict.rank != self._rank:
            explained = RankError(verdict.describe(self._rank, self._phase()))
            # Log it now: a launcher that noticed the failure, too, may end this process before the error is printed.
            logger.error("%s", explained)
            explained.rank = verdict.rank
            return explained
        if not lost:
            return None
        return RankError(
            f"no answer from the other ranks in {self._phase()}, although none has died ({self._describe_others()}): "
            f"{first_line(error)}. If a rank only needs more time, raise ddp_timeout."
        )

    def _describe_others(self) -> str:
        """Return the phase of each other rank, as far as rank 0 knows."""
        if self._rank != 0:
            self._send_to_rank_0("where")
            self._phases_known.wait(2.0)
        now = time.monotonic()
        others = sorted((int(rank), seen) for rank, seen in self._phases.items() if int(rank) != self._rank)
        return "; ".join(f"rank {rank} is in {phase} for {now - at:.0f} s" for rank, (phase, at) in others) or (
            "their phases are unknown"
        )

    # The thread's methods. `announce` calls `_conclude` in the main thread, too.

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            for connection in self._connections.values():
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            while not self._stopping.is_set():
                self._send_phase()
                for key, _ in selector.select(max(0.0, min(_POLL_SECONDS, self._deadline - time.monotonic()))):
                    if key.data is not None and not self._receive(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= self._deadline and not self._stopping.is_set():
                    self._end_process()
        self._wake_receiver.close()

    def _send_phase(self) -> None:
        now = self._phase()
        if now == self._sent_phase:
            return
        self._sent_phase = now
        self._phases[str(self._rank)] = (now, time.monotonic())
        if self._rank != 0:
            self._send_to_rank_0("phase", now)

    def _receive(self, connection: RankConnection) -> bool:
        """Handle the messages of a connection; return whether more may come."""
        try:
            messages = connection.receive()
        except EOFError:
            if not self._stopping.is_set() and connection.rank in self._connections:
                last = self._phases.get(str(connection.rank))
                self._conclude(Verdict(connection.rank, f"{_GONE}; it was last seen in {last[0]}" if last else _GONE))
            return False
        return all([self._handle(connection, *message) for message in messages])

    def _handle(self, connection: RankConnection, kind: str, *values: Any) -> bool:
        """Handle a message; return whether more may come."""
        if kind == "bye":
            self._connections.pop(connection.rank, None)
            return False
        if kind == "phase":
            self._phases[str(connection.rank)] = (values[0], time.monotonic())
        elif kind == "where":
            connection.send(
                "phases", {rank: (phase, time.monotonic() - at) for rank, (phase, at) in self._phases.items()}
            )
        elif kind == "phases":
            self._phases = {rank: (phase, time.monotonic() - ago) for rank, (phase, ago) in values[0].items()}
            self._phases_known.set()
        elif kind == "verdict":
            self._conclude(Verdict(*values))
        return True

    def _conclude(self, verdict: Verdict) -> None:
        """Store and forward a verdict; the first one starts this rank's grace period."""
        is_own = verdict.rank == self._rank
        with self._lock:
            # The ranks have agreed on this failure already, or it is known.
            if verdict.num_agreed < self._num_agreed or verdict in self._verdicts:
                return
            if not self._verdicts:
                # The failing rank waits longer: the others learn of it later, and may still agree on the error with it.
                self._deadline = time.monotonic() + self._grace * (2 if is_own else 1)
            self._verdicts.append(verdict)
        message = ("verdict", verdict.rank, verdict.reason, verdict.num_agreed)
        if self._rank == 0:
            for connection in list(self._connections.values()):
                connection.send(*message)
        elif is_own:
            self._send_to_rank_0(*message)
        self._concluded.set()

    def _send_to_rank_0(self, *message: Any) -> None:
        connection = self._connections.get(0)
        if connection is not None:
            connection.send(*message)

    def _end_process(self) -> None:
        """Print the verdict and exit: no exception would reach a main thread that hangs or is busy."""
        verdict = next(iter(self._verdicts), None)
        if verdict is None:  # withdrawn at the last moment
            return
        # Start with a newline: a progress bar may have left the cursor in its line.
        print(f"\nlowpeak: error: {verdict.describe(self._rank, self._phase())}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def error_text(error: BaseException) -> str:
    """Return an error's message, with its class if that is not lowpeak's."""
    if isinstance(error, LowpeakError):
        return str(error)
    return show_controls(f"{type(error).__name__}: {error}".rstrip(": "))
