"""Ranks: all that a run asks of other processes. One process is the degenerate case of the same calls.

A *rank* has a share of the data. Under tensor parallelism several processes, *peers*, are one rank: they hold parts of one
model's tensors and do the same work, and what the first of them says counts. Sums and choices that must be the same
everywhere go through `sum`, `max`, `min`, `gather` and `first`; whatever one process alone can fail at goes through
`together`, `gathered` and `first`, which make its failure everybody's.
"""

from __future__ import annotations

import atexit
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lowpeak import errors
from lowpeak.errors import LowpeakError, RankError

Item = TypeVar("Item")

# What gloo, NCCL and c10d's store say when a peer is gone or late; they raise plain RuntimeErrors.
_SIGNS = ("gloo", "nccl", "c10d", "tcpstore", "by peer", "broken pipe", "timed out waiting", "collective")
_DRAIN_SECONDS = 0.2


class Failure(NamedTuple):
    """An error on its way to the other ranks; `rank` is whose it was first, None where it is the sender's own."""

    kind: str
    text: str
    rank: int | None


class Ranks:
    """The ranks of a run: `rank` of `world_size`, and the few collectives that a run needs.

    Sums and extremes are of short lists of Python numbers; they travel in float64. With one process each call is the
    identity. Collectives run on the default process group, so peers make each call together too, or on a part of it (`teams`).
    `processes` are the same run's processes, each a rank of its own.
    """

    def __init__(self, device: torch.device | None = None, num_peers: int = 1) -> None:
        live = has_group()
        process, num_processes = (dist.get_rank(), dist.get_world_size()) if live else (0, 1)
        assert num_processes % num_peers == 0, "peers are next to each other, and every rank has as many"
        self.rank = process // num_peers
        self.world_size = num_processes // num_peers
        self.processes = self if num_peers == 1 else Ranks(device)
        self._num_peers = num_peers
        self._alarm: Callable[[Exception], None] | None = None
        self._calm: Callable[[], None] | None = None
        self._group: Any = None  # the default one
        self._device = device if device is not None else torch.device("cpu")

    def teams(self, size: int) -> Ranks:
        """Return the team of this rank: ranks 0 to size-1 are the first one, and so on; all ranks call it together.

        A team's `rank` counts within it. `size` divides the world size.
        """
        assert self.world_size % size == 0, f"{self.world_size} ranks are no teams of {size}"
        assert self._num_peers == 1, "a rank of several processes is in no team"
        team = copy.copy(self)
        team.processes = team
        team.rank, team.world_size = self.rank % size, size
        if size > 1:
            groups = [dist.new_group(range(start, start + size)) for start in range(0, self.world_size, size)]
            team._group = groups[self.rank // size]
        return team

    @property
    def speaks(self) -> bool:
        """Whether this process's word is the rank's: of peers, the first."""
        return self.processes.rank % self._num_peers == 0

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers if self.speaks else [0.0] * len(numbers), dist.ReduceOp.SUM)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor on the run's device, which the host does not read."""
        if self._is_alone:
            return values
        total = values.clone() if self.speaks else torch.zeros_like(values)
        dist.all_reduce(total, group=self._group)
        return total

    def max(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def min(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, dist.ReduceOp.MIN)

    def gather(self, item: Item) -> list[Item]:
        """Return every rank's item, in rank order, on every rank."""
        return self._everybodys(item)[:: self._num_peers]

    @property
    def is_watched(self) -> bool:
        return self._alarm is not None

    @contextmanager
    def alarmed(self, alarm: Callable[[Exception], None], calm: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Tell `alarm` of every error during the block, before ranks agree on it: they may not come to that.

        Where they do, each calls `calm` before it raises.
        """
        self._alarm, self._calm = alarm, calm
        try:
            yield
        finally:
            self._alarm = self._calm = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all ranks enter: an error on any rank is one on every rank.

        The rank that failed raises its own error; the others raise one of its class (RankError where that is not lowpeak's)
        that names the rank and repeats the sentence. Collectives inside are gone through in any case: a block that holds some
        opens a `together` for each part, or keeps its error until the end.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self._is_alone:
                raise
            failure = self._alarming(error)
        if self.max([float(failure is not None)])[0]:
            self._raise(self._everybodys(_packed(failure)), failure)

    def gathered(self, call: Callable[[], Item]) -> list[Item]:
        """`gather(call())`, in which a call that raises does so on every rank, as in `together`."""
        if self._is_alone:
            return [call()]
        failure: Exception | None = None
        answer: Any = None
        try:
            answer = call()
        except Exception as error:
            failure = self._alarming(error)
        answers = self._everybodys((_packed(failure), answer))
        self._raise([packed for packed, _ in answers], failure)
        return [answer for _, answer in answers[:: self._num_peers]]

    def first(self, call: Callable[[], Item]) -> Item:
        """Return what `call()` gives on the first process, which alone makes it; none returns before, its error is everybody's."""
        makes: Callable[[], Any] = call if self.processes.rank == 0 else lambda: None
        return self.gathered(makes)[0]

    @property
    def _is_alone(self) -> bool:
        return self.processes.world_size == 1

    def _everybodys(self, item: Item) -> list[Item]:
        if self._is_alone:
            return [item]
        items: list[Any] = [None] * self.processes.world_size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def _alarming(self, error: Exception) -> Exception:
        if self._alarm is not None:
            self._alarm(error)
        return error

    def _raise(self, packed: Sequence[Failure | None], own: Exception | None) -> None:
        """Raise what the ranks agree on, if one of them failed: the own error unless it only repeats another rank's."""
        failed = [(rank, failure) for rank, failure in enumerate(packed) if failure is not None]
        if not failed:
            return
        if self._calm is not None:
            self._calm()
        if own is not None and getattr(own, "rank", None) is None:
            raise own
        rank, failure = next((pair for pair in failed if pair[1].rank is None), failed[0])
        raise _echo(rank, failure) from own

    def _reduce(self, numbers: Sequence[float], op: Any) -> list[float]:
        if self._is_alone:
            return [float(x) for x in numbers]
        values = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        dist.all_reduce(values, op=op, group=self._group)
        return values.tolist()


def has_group() -> bool:
    """Whether this process is in a process group, of however few."""
    return dist.is_available() and dist.is_initialized()


def leave_at_exit() -> None:
    """Destroy the process group at exit: a thread of Gloo's that frees a tensor while Python ends aborts the process."""
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    if has_group():
        dist.destroy_process_group()
        # Where something still refers to the group, its threads live on: let them finish the last collective.
        time.sleep(_DRAIN_SECONDS)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a process group raised this because another rank did not answer, as far as its words tell."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS)


def _packed(error: Exception | None) -> Failure | None:
    if error is None:
        return None
    return Failure(type(error).__name__, str(error), getattr(error, "rank", None))


def _echo(rank: int, failure: Failure) -> LowpeakError:
    kind: Any = getattr(errors, failure.kind, None)
    is_ours = isinstance(kind, type) and issubclass(kind, LowpeakError)
    told = failure.text if is_ours else f"{failure.kind}: {failure.text}"
    error: LowpeakError = (kind if is_ours else RankError)(f"on rank {rank}, and so all ranks stop: {told}")
    error.rank = rank
    return error
