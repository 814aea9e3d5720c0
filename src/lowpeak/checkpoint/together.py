"""What all ranks do or none: an error on one of them is raised on every one, and nobody waits for who has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lowpeak.errors import CheckpointError

if TYPE_CHECKING:  # staging needs no torch, and its kill tests start a process for each kill
    from lowpeak.ranks import Ranks


class ElsewhereError(Exception):
    """Another rank failed: `reason` is what it said. Whoever opened `together` makes a sentence of it."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


@contextmanager
def together(ranks: Ranks | None, describe: Callable[[Exception], str] = str) -> Iterator[None]:
    """Leave the block when every rank is at its end: with its own error, or `ElsewhereError` where another rank has one.

    Without `ranks` this process is alone.

    A block whose body waits for other ranks must not fail on one of them before it is through: it opens a `together` for
    each part, or keeps its error until the end.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    reason = None if failed is None or isinstance(failed, ElsewhereError) else describe(failed)
    told = [] if ranks is None else ranks.gather(reason)
    if failed is not None:
        raise failed
    for rank, other in enumerate(told):
        if other is not None:
            raise ElsewhereError(rank, other)


@contextmanager
def agreed(ranks: Ranks | None, what: str) -> Iterator[None]:
    """`together`, where another rank's error is `CheckpointError`: `what` could not be done on that rank."""
    try:
        with together(ranks):
            yield
    except ElsewhereError as error:
        raise CheckpointError(f"{what}: rank {error.rank} could not ({error.reason}).") from error
