"""Forwards in step: ranks whose forwards hold collectives run equally many of them, and fail together.

So do the forwards of peers of tensor parallelism. A module of theirs that ends in a collective is its own idle step: called with
zeros of the shape that it would have been given, it takes part in the same collective, in the same dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.errors import EngineError
from lowpeak.parallel.flat_shard import all_gather

_DONE, _RUNNING, _FAILED = 0, 1, 2


class Match:
    """Before each forward every rank tells the others that it runs one; at its end, that it is done.

    A rank that is done runs forwards of one token until all are. A rank that fails first goes through the collectives that
    are left of its forward (`steps`), since the others do; then it says so, and they raise EngineError at their next forward.
    `group` are the ranks, None all of them.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device = device
        self._group = group
        self._steps: list[Callable[[], Any]] = []
        self._num_done = 0
        self._sound = True  # no collective is under way, and nobody has failed
        self.num_forwards = 0
        self._autocast: torch.dtype | None = None
        self.arguments: Mapping[str, Any] = {}  # of the forward that runs, for steps that depend on them

    def step(self, run: Callable[..., Any], idle: Callable[[], Any]) -> Callable[..., Any]:
        """`run`, the next of a forward's collectives; `idle` takes part in it for nothing."""
        self._steps.append(idle)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._sound = False
            kind = self.device.type
            self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            result = run(*args, **kwargs)
            self._sound = True
            self._num_done += 1
            return result

        return counted

    def computing(self) -> AbstractContextManager[Any]:
        dtype = self._autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def begin(self) -> None:
        self._num_done = 0
        self.num_forwards += 1
        self._exchange(_RUNNING)

    def finish(self, forward: Callable[[], Any]) -> None:
        """Run the `forward` of one token until all ranks are done."""
        while self._exchange(_DONE):
            self._num_done = 0
            forward()

    def drain(self) -> None:
        """After an error in a forward: take part in the collectives that are left of it."""
        if self._sound:
            self._sound = False
            for idle in self._steps[self._num_done :]:
                idle()
            self._sound = True

    def fail(self) -> None:
        """Tell the others that this rank raises; nothing where they know, or cannot be told."""
        if self._sound:
            self._sound = False
            self._gather(_FAILED)

    def _exchange(self, state: int) -> bool:
        """Return whether any rank runs; EngineError where one has failed."""
        self._sound = False
        states = self._gather(state)
        if _FAILED in states:
            failed = dist.get_process_group_ranks(self._group)[states.index(_FAILED)]
            error = EngineError(
                f"rank {failed} failed while it generated, and the others cannot go on without it: its own error says why."
            )
            error.rank = failed
            raise error
        self._sound = True
        return _RUNNING in states

    def _gather(self, state: int) -> list[int]:
        own = torch.tensor([state], device=self.device)
        table = own.new_empty(dist.get_world_size(self._group))
        all_gather(table, own, self._group)
        return table.tolist()


@contextmanager
def matched(model: nn.Module, match: Match) -> Iterator[None]:
    """Forwards of `model` in the block run in step on all ranks, which leave the block together."""
    original = model.forward
    idle = False

    def in_step(*args: Any, **kwargs: Any) -> Any:
        if not idle:
            match.begin()
        match.arguments = {"input_ids": args[0], **kwargs} if args else kwargs
        try:
            return original(*args, **kwargs)
        except BaseException:
            match.drain()
            raise

    in_step.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # engines and generate() read it
    with ExitStack() as stack:
        replace_forward(stack, model, in_step)
        one_token = torch.zeros(1, 1, dtype=torch.int64, device=match.device)
        try:
            yield
            idle = True
            with torch.no_grad():
                match.finish(lambda: model(input_ids=one_token, use_cache=False))
        except BaseException:
            match.fail()
            raise


def replace_forward(stack: ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of a module until the stack unwinds."""
    own = module.__dict__.get("forward")
    module.forward = forward
    if own is None:
        stack.callback(module.__delattr__, "forward")
    else:
        stack.callback(setattr, module, "forward", own)


@dataclass(frozen=True)
class Peers:
    """The modules whose forwards end in a collective of peers, and the peers' process group; by default there are none."""

    modules: Sequence[nn.Module] = ()
    group: Any = None

    def meet(self, stack: ExitStack, match: Match, part: nn.Module | None, is_head: bool = False) -> None:
        """Make those at or below `part` steps of the match, in the order in which they stand, and run."""
        for module in part.modules() if part is not None else ():
            if any(module is each for each in self.modules):
                nothing = _no_positions if is_head else _nothing
                idle = partial(_idle, match, module, module.forward, nothing)
                replace_forward(stack, module, match.step(module.forward, idle))


def _idle(match: Match, module: nn.Module, forward: Callable[..., Any], nothing: Callable[..., Any]) -> None:
    values, more = nothing(module, match.arguments)
    with torch.no_grad(), match.computing():
        forward(values, **more)


def _nothing(module: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return ids, or hidden states of all positions, as this forward would have given them to the module."""
    ids_BL = arguments["input_ids"]
    if isinstance(module, nn.Embedding):
        return torch.zeros_like(ids_BL), {}
    return _zeros(module, *ids_BL.shape), {}


def _no_positions(head: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return hidden states of the positions whose logits this forward keeps, or of all and what is asked of them."""
    num_rows, length = arguments["input_ids"].shape
    if arguments.get("head_request") is not None:
        return _zeros(head, num_rows, length), {"head_request": arguments["head_request"]}
    kept = arguments.get("logits_to_keep", 0)
    return _zeros(head, num_rows, min(kept or length, length) if isinstance(kept, int) else len(kept)), {}


def _zeros(module: Any, num_rows: int, length: int) -> Tensor:
    weight = module.weight
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.new_zeros(num_rows, length, local.shape[1])
