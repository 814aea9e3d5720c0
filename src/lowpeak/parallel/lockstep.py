"""Lockstep: ranks whose forwards contain collectives run the same number of forwards, and fail together.

The ranks of a tensor parallel group do too. There a module that ends in a collective is its own dummy call: run on zeros of the
shape of its input, it takes part in the same collective, in the same dtype.
"""

from __future__ import annotations

import inspect
import time
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
from lowpeak.parallel.parameters import gather_numbers

_DONE, _RUNNING, _FAILED, _WAITING = range(4)
_PAUSE = 0.002  # seconds between two exchanges of ranks that wait


class Lockstep:
    """The state that ranks exchange before each forward: running, waiting, done or failed.

    A rank that waits or is done runs forwards of one token with the others, until all ranks are done. A rank that fails first
    runs the remaining collectives of its forward as dummy calls, since the others wait in them; then it reports the failure, and
    the others raise EngineError at their next forward. `group` are the ranks, None all of them.

        module.forward = lockstep.register(module.forward, dummy)    # each module with a collective, in a forward's order
        for ids in batches:                                          # as many as this rank has
            lockstep.begin()
            model(input_ids=ids)                                     # after an error: lockstep.drain(), then lockstep.fail()
        lockstep.wait(lambda: model(input_ids=one_token))            # for a while, if a batch may come later
        lockstep.finish(lambda: model(input_ids=one_token))          # until all ranks are done
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device = device
        self._group = group
        self._dummies: list[Callable[[], Any]] = []  # one for each collective of a forward, in their order
        self._num_done = 0
        self._in_order = True  # no collective is in progress, and no rank has failed
        self.num_forwards = 0
        self._autocast: torch.dtype | None = None
        self.forward_kwargs: Mapping[str, Any] = {}  # of the current forward: shapes of dummy inputs depend on them

    def register(self, run: Callable[..., Any], dummy: Callable[[], Any]) -> Callable[..., Any]:
        """Return `run`, counted as the next collective of a forward; `dummy` takes part in it without a result."""
        self._dummies.append(dummy)

        def run_and_count(*args: Any, **kwargs: Any) -> Any:
            self._in_order = False
            kind = self.device.type
            self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            result = run(*args, **kwargs)
            self._in_order = True
            self._num_done += 1
            return result

        return run_and_count

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the last collective."""
        dtype = self._autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def begin(self) -> None:
        """Tell the other ranks that this rank runs a forward."""
        self._num_done = 0
        self.num_forwards += 1
        self._exchange(_RUNNING)

    def wait(self, forward: Callable[[], Any]) -> None:
        """Run `forward`, of one token, if another rank runs one, otherwise pause."""
        self._take_part(_WAITING, forward)

    def finish(self, forward: Callable[[], Any]) -> None:
        """Run `forward`, of one token, until all ranks are done."""
        while self._take_part(_DONE, forward):
            pass

    def _take_part(self, state: int, forward: Callable[[], Any]) -> bool:
        """Run `forward` if another rank runs one; return whether any rank is not done."""
        states = self._exchange(state)
        if _RUNNING in states:
            self._num_done = 0
            forward()
        elif _WAITING in states:
            time.sleep(_PAUSE)
        return any(each != _DONE for each in states)

    def drain(self) -> None:
        """Take part in the remaining collectives of a forward that has failed on this rank."""
        if self._in_order:
            self._in_order = False
            for dummy in self._dummies[self._num_done :]:
                dummy()
            self._in_order = True

    def fail(self) -> None:
        """Tell the other ranks that this rank raises, unless they know or are inside another collective."""
        if self._in_order:
            self._in_order = False
            gather_numbers(_FAILED, self.device, self._group)

    def close(self) -> None:
        """Drop buffers and the KV cache: the dummies form a reference cycle with this object."""
        self._dummies.clear()
        self.forward_kwargs = {}

    def _exchange(self, state: int) -> Sequence[int]:
        """Return the states of all ranks; EngineError if a rank has failed."""
        self._in_order = False
        states = gather_numbers(state, self.device, self._group)
        if _FAILED in states:
            failed = dist.get_process_group_ranks(self._group)[states.index(_FAILED)]
            error = EngineError(
                f"rank {failed} failed during generation, so the other ranks stop; its error message gives the reason."
            )
            error.rank = failed
            raise error
        self._in_order = True
        return states


@contextmanager
def lockstep_forwards(model: nn.Module, lockstep: Lockstep) -> Iterator[None]:
    """Run forwards of `model` in lockstep inside the block, which all ranks leave together.

    A caller that has no forward to run calls `model.forward.wait_in_step()` until it has one.
    """
    original = model.forward
    only_others_run = False

    def in_step(*args: Any, **kwargs: Any) -> Any:
        if not only_others_run:
            lockstep.begin()
        lockstep.forward_kwargs = {"input_ids": args[0], **kwargs} if args else kwargs
        try:
            return original(*args, **kwargs)
        except BaseException:
            lockstep.drain()
            raise

    one_token = torch.zeros(1, 1, dtype=torch.int64, device=lockstep.device)

    def run_for_others() -> None:
        nonlocal only_others_run
        only_others_run = True
        with torch.no_grad():
            model(input_ids=one_token, use_cache=False)
        only_others_run = False

    in_step.wait_in_step = partial(lockstep.wait, run_for_others)  # type: ignore[attr-defined]
    in_step.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # engines and generate() read it
    with ExitStack() as stack:
        override_forward(stack, model, in_step)
        try:
            yield
            lockstep.finish(run_for_others)
        except BaseException:
            lockstep.fail()
            raise
        finally:
            lockstep.close()


def override_forward(stack: ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of a module until the stack unwinds."""
    previous = module.__dict__.get("forward")
    module.forward = forward
    if previous is None:
        stack.callback(module.__delattr__, "forward")
    else:
        stack.callback(setattr, module, "forward", previous)


@dataclass(frozen=True)
class TPCollectives:
    """The modules whose forwards end in a collective of tensor parallelism, and its process group; none by default."""

    modules: Sequence[nn.Module] = ()
    group: Any = None

    def register(self, stack: ExitStack, lockstep: Lockstep, part: nn.Module | None, is_head: bool = False) -> None:
        """Register the modules at or below `part` with the lockstep, in their order of execution."""
        for module in part.modules() if part is not None else ():
            if any(module is each for each in self.modules):
                make_inputs = _zero_head_inputs if is_head else _zero_inputs
                dummy = partial(_dummy_call, lockstep, module, module.forward, make_inputs)
                override_forward(stack, module, lockstep.register(module.forward, dummy))


def _dummy_call(
    lockstep: Lockstep, module: nn.Module, forward: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    values, more = make_inputs(module, lockstep.forward_kwargs)
    with torch.no_grad(), lockstep.autocast():
        forward(values, **more)


def _zero_inputs(module: nn.Module, forward_kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return zeros in the shape of the module's input in this forward: ids or hidden states."""
    ids_BL = forward_kwargs["input_ids"]
    if isinstance(module, nn.Embedding):
        return torch.zeros_like(ids_BL), {}
    return _zeros(module, *ids_BL.shape), {}


def _zero_head_inputs(head: nn.Module, forward_kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return zeros for the positions whose logits this forward computes; with a head request, for all positions."""
    num_rows, length = forward_kwargs["input_ids"].shape
    if forward_kwargs.get("head_request") is not None:
        return _zeros(head, num_rows, length), {"head_request": forward_kwargs["head_request"]}
    kept = forward_kwargs.get("logits_to_keep", 0)
    return _zeros(head, num_rows, min(kept or length, length) if isinstance(kept, int) else len(kept)), {}


def _zeros(module: Any, num_rows: int, length: int) -> Tensor:
    weight = module.weight
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.new_zeros(num_rows, length, local.shape[1])
