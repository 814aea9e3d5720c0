"""Forwards in step: ranks whose forwards hold collectives run equally many of them, and fail together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowpeak.errors import EngineError
from lowpeak.strategies.flat import all_gather

_DONE, _RUNNING, _FAILED = 0, 1, 2


class Match:
    """Before each forward every rank tells the others that it runs one, and of how many tokens; at its end, that it is done.

    A rank that is done runs forwards of one token until all are. A rank that fails says so, and the others raise EngineError at
    their next forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._agreed = True  # no collective of ours is under way, and nobody has failed
        self.num_tokens: list[int] = []  # of the forward under way, on each rank

    def begin(self, num_tokens: int) -> None:
        """This rank will run a forward of so many tokens."""
        self._exchange(_RUNNING, num_tokens)

    def finish(self, forward: Callable[[], Any]) -> None:
        """Run the `forward` of one token until all ranks are done."""
        while self._exchange(_DONE, 1):
            forward()

    def fail(self) -> None:
        """Tell the others that this rank raises; nothing where they know, or cannot be told."""
        if self._agreed:
            self._agreed = False
            self._gather(_FAILED, 0)

    def _exchange(self, state: int, num_tokens: int) -> bool:
        """Whether any rank runs; EngineError where one has failed."""
        self._agreed = False
        table = self._gather(state, num_tokens)
        failed = [rank for rank, (theirs, _) in enumerate(table) if theirs == _FAILED]
        if failed:
            error = EngineError(
                f"rank {failed[0]} failed while it generated, and the others cannot go on without it: its own error says why."
            )
            error.rank = failed[0]
            raise error
        self._agreed = True
        self.num_tokens = [number for _, number in table]
        return any(theirs == _RUNNING for theirs, _ in table)

    def _gather(self, state: int, num_tokens: int) -> list[list[int]]:
        own = torch.tensor([state, num_tokens], device=self._device)
        table = torch.empty(dist.get_world_size() * 2, dtype=own.dtype, device=self._device)
        all_gather(table, own)
        return table.view(-1, 2).tolist()


@contextmanager
def matched(model: nn.Module, match: Match) -> Iterator[None]:
    """Forwards of `model` in the block run in step on all ranks, which leave the block together."""
    idle = False

    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if not idle:
            match.begin(ids.numel())

    handle = model.register_forward_pre_hook(tell, with_kwargs=True)
    one_token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        yield
        idle = True
        with torch.no_grad():
            match.finish(lambda: model(input_ids=one_token, use_cache=False))
    except BaseException:
        match.fail()
        raise
    finally:
        handle.remove()
