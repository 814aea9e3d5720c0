"""What a forward pass carries to its attention layers: a forest's trees, and what is built of them once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.attention.calls import Calls, calls_of
from lowpeak.attention.flex import block_mask
from lowpeak.records import Forest, Tree


class ForestLayout:
    """The keyword argument `forest` of a model's forward.

    Neither a tuple nor a dataclass, because wrappers (DDP, FSDP) take those apart to move and cast tensors.
    """

    __slots__ = ("_calls", "block_mask", "trees")

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.trees: tuple[Tree, ...] = forest.trees
        length = forest.position_ids_1L.shape[1]
        self.block_mask = block_mask(forest.trees, length, device) if device.type == "cuda" else None
        self._calls: Calls | None = None

    def calls(self, query_1HLE: Tensor) -> Calls:
        """The kernel calls of the CPU's way, built by the first layer that goes it."""
        if self._calls is None:
            _, num_heads, length, width = query_1HLE.shape
            self._calls = calls_of(self.trees, length, num_heads * width, query_1HLE.device)
        return self._calls
