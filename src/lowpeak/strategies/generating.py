"""What every strategy does to a model that generates, and undoes: eval mode, no activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no activation checkpointing; each module's own mode and flag come back however the block is left."""
    modes = [(module, module.training) for module in model.modules()]
    flags: list[tuple[Any, Any]] = [
        (m, m.gradient_checkpointing) for m in model.modules() if getattr(m, "gradient_checkpointing", None)
    ]
    try:
        model.eval()
        for module, _ in flags:
            module.gradient_checkpointing = False
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module, flag in flags:
            module.gradient_checkpointing = flag
