"""The ranks of a run: sums, extremes, gathers and errors across processes.

A *rank* has a share of the data. Under tensor parallelism (TP) several processes are one rank: each has a part of the model's
tensors, all do the same work, and the first of them, the TP leader, contributes for the rank. In a single process every
method works without communication, so callers need no branch.

Two kinds of methods:

- `sum`, `max`, `min`, `gather` exchange values. All ranks must call them in the same order.
- `call_on_all`, `call_on_first` and `propagate_errors` run code that may fail on one rank alone, and raise its error on all
  ranks. Without them the other ranks would wait in their next collective until it times out.
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
from lowpeak.errors import (
    AgreedMemoryError,
    LocalMemoryError,
    LostEngineError,
    LowpeakError,
    MemoryExhaustedError,
    RankError,
)

Item = TypeVar("Item")

# Words of gloo's, NCCL's and c10d's errors when another process is gone or late; they raise plain RuntimeErrors.
_LOST_CONNECTION = ("gloo", "nccl", "c10d", "tcpstore", "by peer", "broken pipe", "timed out waiting", "collective")
# Words of NCCL's errors when its own allocations fail, which are outside of torch's allocator.
_NCCL_OUT_OF_MEMORY = ("out of memory", "failed to cuda calloc", "failed to cuda malloc", "failed to cuda host alloc")
_DRAIN_SECONDS = 0.2


class Failure(NamedTuple):
    """An error as sent to the other ranks; `rank` is where it began, None if on the sender; `reason` is a memory error's."""

    kind: str
    text: str
    rank: int | None
    reason: str = ""


class Ranks:
    """Rank `rank` of `world_size`, with the collectives that a run needs.

    Sums and extremes are of short lists of Python numbers, in float64. Collectives run on the default process group (or on
    a `subgroup`), so the processes of a TP group must all make each call. `processes` is the same run without TP groups: each
    process counts as a rank.
    """

    def __init__(self, device: torch.device | None = None, tp_size: int = 1) -> None:
        live = has_process_group()
        process, num_processes = (dist.get_rank(), dist.get_world_size()) if live else (0, 1)
        assert num_processes % tp_size == 0, f"{num_processes} processes cannot form ranks of {tp_size} each"
        self.rank = process // tp_size
        self.world_size = num_processes // tp_size
        self.processes = self if tp_size == 1 else Ranks(device)
        self._tp_size = tp_size
        self._on_error: Callable[[Exception], None] | None = None
        self._on_agreed: Callable[[], None] | None = None
        self._group: Any = None  # None: the default process group
        self._device = device if device is not None else torch.device("cpu")

    def subgroup(self, size: int) -> Ranks:
        """Return this rank's subgroup of `size` neighbouring ranks; all ranks must call it.

        Ranks 0 to size-1 are the first subgroup, and so on; `rank` counts within it. `size` must divide the world size.
        """
        assert self.world_size % size == 0, f"{self.world_size} ranks cannot be split into subgroups of {size}"
        assert self._tp_size == 1, "a rank with several processes cannot be in a subgroup"
        subgroup = copy.copy(self)
        subgroup.processes = subgroup
        subgroup.rank, subgroup.world_size = self.rank % size, size
        if size > 1:
            # Every process must create every group, also those that it is not in.
            groups = [dist.new_group(range(start, start + size)) for start in range(0, self.world_size, size)]
            subgroup._group = groups[self.rank // size]
        return subgroup

    @property
    def is_tp_leader(self) -> bool:
        """Whether this process contributes for its rank: the first of a TP group, else every process."""
        return self.processes.rank % self._tp_size == 0

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers if self.is_tp_leader else [0.0] * len(numbers), dist.ReduceOp.SUM)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor on the run's device, without a host synchronization."""
        if self._is_single:
            return values
        total = values.clone() if self.is_tp_leader else torch.zeros_like(values)
        dist.all_reduce(total, group=self._group)
        return total

    def max(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def min(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, dist.ReduceOp.MIN)

    def gather(self, item: Item) -> list[Item]:
        """Return every rank's item, in rank order, on every rank."""
        return self._gather_from_processes(item)[:: self._tp_size]

    @property
    def reports_errors(self) -> bool:
        return self._on_error is not None

    @contextmanager
    def report_errors(
        self, on_error: Callable[[Exception], None], on_agreed: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Call `on_error` with every error during the block, before the ranks agree on it.

        They may never agree: another rank can hang in a collective. If they do, each rank calls `on_agreed` before it raises.
        """
        self._on_error, self._on_agreed = on_error, on_agreed
        try:
            yield
        finally:
            self._on_error = self._on_agreed = None

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Raise an error of the block on all ranks; all ranks must enter it.

        The rank that failed raises its error unchanged. The others raise one of the same class (RankError if the class is not
        lowpeak's) that names the rank and repeats the message. If ranks failed for several reasons, all raise for one: an error
        that ends the run before a lack of memory, and that before a lost engine. For memory all ranks raise AgreedMemoryError.

        Collectives inside the block must run on every rank, also on one that failed: wrap each part between them in a block, or
        defer the error to the end.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if self._is_single:
                raise
            error = self._report(raised)
        # One number without an error, which is the rule; the errors themselves are gathered only if there is one.
        if self.max([float(error is not None)])[0]:
            self._raise_first(self._gather_from_processes(_failure_of(error)), error)

    def call_on_all(self, call: Callable[[], Item]) -> list[Item]:
        """Run `call` on all ranks and return their results in rank order. Errors are raised as in `propagate_errors`."""
        if self._is_single:
            return [call()]
        error: Exception | None = None
        result: Any = None
        try:
            result = call()
        except Exception as raised:
            error = self._report(raised)
        gathered = self._gather_from_processes((_failure_of(error), result))
        self._raise_first([failure for failure, _ in gathered], error)
        # The processes of a tensor parallel group are one rank, with the same result.
        return [result for _, result in gathered[:: self._tp_size]]

    def call_on_first(self, call: Callable[[], Item]) -> Item:
        """Run `call` on the first process alone, and return its result, or raise its error, on all ranks.

        No rank returns before `call` has ended.
        """
        run: Callable[[], Any] = call if self.processes.rank == 0 else lambda: None
        return self.call_on_all(run)[0]

    @property
    def _is_single(self) -> bool:
        return self.processes.world_size == 1

    def _gather_from_processes(self, item: Item) -> list[Item]:
        if self._is_single:
            return [item]
        items: list[Any] = [None] * self.processes.world_size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def _report(self, error: Exception) -> Exception:
        """Report an error of this rank and return it; raise RankError if collectives are impossible."""
        nccl_error = nccl_memory_error(error)
        if self._on_error is not None and not isinstance(error, LocalMemoryError | AgreedMemoryError):
            self._on_error(nccl_error or error)
        if nccl_error is not None:
            raise nccl_error from error
        return error

    def _raise_first(self, failures: Sequence[Failure | None], own_error: Exception | None) -> None:
        """Raise the processes' error, if one of them failed; on every process the same, which may be `own_error`."""
        failed = [(process, failure) for process, failure in enumerate(failures) if failure is not None]
        if not failed:
            return
        if self._on_agreed is not None:
            self._on_agreed()
        error = _first_cause(failed, own_error)
        if isinstance(error, MemoryExhaustedError):
            agreed = AgreedMemoryError(str(error), error.reason)
            agreed.rank = error.rank
            raise agreed from own_error
        if error is own_error:
            raise error
        raise error from own_error

    def _reduce(self, numbers: Sequence[float], op: Any) -> list[float]:
        if self._is_single:
            return [float(x) for x in numbers]
        # Bytes and counts above 2**24 stay exact in fp64.
        values = torch.tensor(list(numbers), dtype=torch.float64, device=self._device)
        dist.all_reduce(values, op=op, group=self._group)
        return values.tolist()


def _first_cause(failed: Sequence[tuple[int, Failure]], own_error: Exception | None) -> Exception:
    """Return this process's error, or another's first one, of the same kind on all processes.

    A memory error may be repaired with a lost engine, so it comes before that; another error ends the run and comes first. An error
    with a rank only repeats that rank's: in lockstep the peers of a rank that ran out of memory raise EngineError.
    """
    causes = [pair for pair in failed if pair[1].rank is None] or list(failed)
    first = min(map(_precedence, (failure for _, failure in causes)))
    own = _failure_of(own_error)
    if own_error is not None and own is not None and own.rank is None and _precedence(own) == first:
        return own_error
    return _error_of(*next(pair for pair in causes if _precedence(pair[1]) == first))


def _precedence(failure: Failure) -> int:
    """Return 0 for an error that ends the run, 1 for a lack of memory, 2 for a lost engine."""
    if _is_memory_error(failure):
        return 1
    return 2 if issubclass(_class_of(failure) or Exception, LostEngineError) else 0


def has_process_group() -> bool:
    """Return whether torch.distributed has a default process group, of any size."""
    return dist.is_available() and dist.is_initialized()


def destroy_group_at_exit() -> None:
    """Destroy the process group when Python exits.

    Otherwise a thread of Gloo may free a tensor while the interpreter shuts down, which aborts the process.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    if has_process_group():
        dist.destroy_process_group()
        # Its threads live on if something still refers to the group: let them finish the last collective.
        time.sleep(_DRAIN_SECONDS)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a process group raised this because another rank did not answer, by its message."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _LOST_CONNECTION)


def nccl_memory_error(error: BaseException) -> RankError | None:
    """Return a RankError with a remedy if NCCL ran out of device memory, else None."""
    text = str(error)
    lowered = text.lower()
    if isinstance(error, LowpeakError) or "nccl" not in lowered or not any(w in lowered for w in _NCCL_OUT_OF_MEMORY):
        return None
    return RankError(
        "NCCL ran out of device memory. Its communicator is lost, so smaller sizes cannot be tried and the run ends: leave more of "
        "the device to NCCL, which allocates outside of torch, with a lower memory_budget or vllm_gpu_memory_utilization. "
        f"({text.strip().splitlines()[-1].strip()})"
    )


def _failure_of(error: Exception | None) -> Failure | None:
    if error is None:
        return None
    reason = error.reason if isinstance(error, MemoryExhaustedError) else ""
    return Failure(type(error).__name__, str(error), getattr(error, "rank", None), reason)


def _class_of(failure: Failure) -> type[LowpeakError] | None:
    """Return the error's class if it is lowpeak's."""
    kind = getattr(errors, failure.kind, None)
    return kind if isinstance(kind, type) and issubclass(kind, LowpeakError) else None


def _is_memory_error(failure: Failure) -> bool:
    return issubclass(_class_of(failure) or Exception, MemoryExhaustedError)


def _error_of(rank: int, failure: Failure) -> LowpeakError:
    kind = _class_of(failure)
    message = failure.text if kind is not None else f"{failure.kind}: {failure.text}"
    message = f"on rank {rank}, so all ranks stop: {message}"
    if _is_memory_error(failure):
        error: LowpeakError = MemoryExhaustedError(message, failure.reason)
    else:
        error = (kind or RankError)(message)
    error.rank = rank
    return error
