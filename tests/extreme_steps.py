"""Steps of CompactAdamW on extreme weights and gradients, for the tests of its torch operations and of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.optim.compact_adamw import MOMENTS, CompactAdamW, UpdatedShard
from lowpeak.optim.formats import TensorStep

ROWS, COLUMNS = 70, 96
LARGEST = 3.4028234663852886e38
WEIGHTS = (0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 0.02, -1.0, 3e38, -3e38, 3.3961776e38, LARGEST, -LARGEST)
GRADIENTS = (0.0, 1e-45, -1e-30, 1e-12, 1.0, -1e10, 1e19, -1e30, LARGEST)
FORMATS = [(weight_bits, state_bits) for weight_bits in (32, 24, 16) for state_bits in (8, 32)]


def steps(
    gradients: float, weight_bits: Any, state_bits: Any, kernel: Callable[[TensorStep], None] | None, **options: Any
) -> tuple[CompactAdamW, nn.Parameter]:
    """Three steps of weights of every extreme in every block, with gradients up to this size; the third is of zeros."""
    values = torch.tensor(WEIGHTS).repeat(ROWS, COLUMNS // len(WEIGHTS))
    weight = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16))
    optimizer = CompactAdamW([weight], weight_bits=weight_bits, state_bits=state_bits, **{"lr": 1e-3, **options})
    optimizer.place({weight: UpdatedShard("w", 0, 0, weight.numel())})
    optimizer.write(weight, {"weight": values.flatten()})
    signs = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    for step in range(3):
        gradient = (signs.clamp(-1, 1) * gradients * (step < 2)).to(weight.dtype)
        gradient[0] = 0  # a row without gradients
        optimizer.update_tensor(weight, gradient.view(-1), optimizer.param_groups[0], kernel)
    return optimizer, weight


def read(optimizer: CompactAdamW, weight: nn.Parameter) -> dict[str, Tensor]:
    """The fp32 values of weights and moments."""
    return {key: optimizer.read(weight, key, 0, weight.numel()).view_as(weight) for key in ("weight", *MOMENTS)}
