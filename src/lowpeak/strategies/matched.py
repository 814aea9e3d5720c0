"""Forwards in step: ranks whose forwards hold collectives run equally many of them, and fail together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lowpeak.errors import EngineError
from lowpeak.strategies.flat import all_gather

_DONE, _RUNNING, _FAILED = 0, 1, 2

P = ParamSpec("P")
R = TypeVar("R")


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

    def step(self, run: Callable[P, R], idle: Callable[[], Any]) -> Callable[P, R]:
        """`run`, the next of a forward's collectives; `idle` takes part in it for nothing."""
        self._steps.append(idle)

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            self._sound = False
            self._autocast = autocast_dtype(self.device)
            result = run(*args, **kwargs)
            self._sound = True
            self._num_done += 1
            return result

        return counted

    def computing(self) -> AbstractContextManager[Any]:
        """A context that computes as the last step did."""
        dtype = self._autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def begin(self) -> None:
        """This rank runs a forward now."""
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
        """Whether any rank runs; EngineError where one has failed."""
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


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on such a device now; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


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
    """Another forward for a module until the stack unwinds."""
    own = module.__dict__.get("forward")
    module.forward = forward
    if own is None:
        stack.callback(module.__delattr__, "forward")
    else:
        stack.callback(setattr, module, "forward", own)
