"""Why a run cannot go on, and the sentences about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from lowpeak.errors import LowpeakError, show_controls

GONE = "is gone (killed, or its host is lost)"


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
        """What `rank`, which is in `phase`, says of it."""
        if self.rank == rank:
            return f"rank {rank} {self.what}"
        return f"rank {self.rank} {self.what.rstrip('.')}. Rank {rank} was in {phase} and cannot go on without it."


def told(error: BaseException) -> str:
    """An error in one line, with its class where it is not lowpeak's."""
    return (
        str(error)
        if isinstance(error, LowpeakError)
        else show_controls(f"{type(error).__name__}: {error}".rstrip(": "))
    )


def places(phases: Mapping[str, tuple[str, float]], but: int) -> str:
    """Where each rank is, by its phase and since when, `but` the one that asks."""
    now = time.monotonic()
    found = [
        f"rank {rank} is in {phase} for {now - at:.0f} s"
        for rank, (phase, at) in sorted(phases.items(), key=lambda item: int(item[0]))
        if int(rank) != but
    ]
    return "; ".join(found) or "where is not known"
