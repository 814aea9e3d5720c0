"""What ranks do in the tests of tensor parallelism's faults: one of two peers runs out of memory in a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fault_ranks import error_of, note, rank
from setups import build, tensor_parallel
from torch import nn


class Exhausted:
    """A `hold` of whose model one part finds no memory when it is called for the third time, on the second process alone."""

    def __init__(self, hold: Any, part: str) -> None:
        self._hold = hold
        self._part = part
        self._calls = 0

    @contextmanager
    def __call__(self) -> Iterator[nn.Module]:
        with self._hold() as model:
            handle = model.get_submodule(self._part).register_forward_pre_hook(self._count)
            try:
                yield model
            finally:
                handle.remove()

    def _count(self, module: nn.Module, args: Any) -> None:
        self._calls += 1
        if rank() == 1 and self._calls == 3:
            raise torch.OutOfMemoryError("no room")


PARTS = ("", "model.layers.0.self_attn", "model.layers.1.mlp", "model.norm", "lm_head")


def exhaust(place: Path, model: str, sizes: tuple[int, int], budget: str | None) -> None:
    """Rollouts that fail on one peer, before a forward or at a part of it, and then a run that trains."""
    more = {} if budget is None else {"gather_budget": budget}
    arguments = {"per_device_train_batch_size": 8 // sizes[1], "max_steps": 1, **tensor_parallel(*sizes), **more}
    trainer = build("GRPO", place / "run", arguments, model)
    engine = trainer.maker.engine
    whole, errors = engine._hold, {}
    for part in PARTS:
        engine._hold = Exhausted(whole, part)
        errors[part] = error_of(trainer.train)
    engine._hold = whole
    trainer.train()
    note(place, errors=errors, step=trainer.state.global_step)
