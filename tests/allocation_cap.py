"""A cap on the bytes that a phase may allocate, beyond which tensors' creation fails as on a full device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.utils._pytree import tree_leaves

from lowpeak.memory.phases import Phase
from lowpeak.plan.rehearsal.storage_meter import StorageMeter


class AllocationCap(StorageMeter):
    """Counts the bytes of tensors made inside it; raises OutOfMemoryError for the one beyond `most` bytes."""

    def __init__(self, most: int) -> None:
        super().__init__(block=1)
        self.most, self.highest, self.num_errors = most, 0, 0

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._sizes or tensor.untyped_storage()._cdata in self._ignored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and not self.knows(leaf):
                self.ignore(leaf.untyped_storage())  # made before
        if active_fake_mode() is not None:  # DTensor propagates shapes: nothing is allocated
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live_bytes > self.most:
            del out
            self.num_errors += 1
            raise torch.OutOfMemoryError(f"{self.live_bytes} bytes, of {self.most}")
        self.highest = max(self.highest, self.live_bytes)
        return out


class CappedPhases:
    """Caps on phases of a trainer's run, in place of its tracker's; `highest` is what each phase took at most."""

    def __init__(self, trainer: Any, caps: dict[Phase, int]) -> None:
        self.highest: dict[str, int] = {}
        self.num_errors = 0
        self.caps, self._phase = caps, trainer.run.tracker.phase
        trainer.run.tracker.phase = self.phase

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        cap = AllocationCap(self.caps.get(phase, 1 << 60))
        try:
            with self._phase(phase), cap:
                yield
        finally:
            self.highest[phase.value] = max(cap.highest, self.highest.get(phase.value, 0))
            self.num_errors += cap.num_errors
