"""Forwards in step: ranks whose forwards hold collectives run equally many of them, and fail together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[Callable[[], Any]] = []
        self._num_done = 0
        self._sound = True  # no collective is under way, and nobody has failed
        self.num_forwards = 0

    def step(self, run: Callable[P, R], idle: Callable[[], Any]) -> Callable[P, R]:
        """`run`, the next of a forward's collectives; `idle` takes part in it for nothing."""
        self._steps.append(idle)

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            self._sound = False
            result = run(*args, **kwargs)
            self._sound = True
            self._num_done += 1
            return result

        return counted

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
            error = EngineError(
                f"rank {states.index(_FAILED)} failed while it generated, and the others cannot go on without it: its own "
                "error says why."
            )
            error.rank = states.index(_FAILED)
            raise error
        self._sound = True
        return _RUNNING in states

    def _gather(self, state: int) -> list[int]:
        own = torch.tensor([state], device=self._device)
        table = own.new_empty(dist.get_world_size())
        all_gather(table, own)
        return table.tolist()


@contextmanager
def matched(model: nn.Module, match: Match) -> Iterator[None]:
    """Forwards of `model` in the block run in step on all ranks, which leave the block together."""
    original = model.forward
    idle = False

    def in_step(*args: Any, **kwargs: Any) -> Any:
        if not idle:
            match.begin()
        try:
            return original(*args, **kwargs)
        except BaseException:
            match.drain()
            raise

    in_step.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # engines and generate() read it
    with ExitStack() as stack:
        replace_forward(stack, model, in_step)
        one_token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
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
