"""A linear layer with the memory of bitsandbytes' 4- and 8-bit layers, for rehearsals: bitsandbytes needs real tensors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

_BLOCK = 64  # weights that share an fp32 scale in 4 bits (Dettmers et al. 2023, arXiv 2305.14314, section 3)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that stores its weight in 4 or 8 bits, and widens it for each product."""

    def __init__(self, like: nn.Linear, bits: Literal[4, 8]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        numel = like.weight.numel()
        packed: Any = nn.Parameter(torch.empty(numel * bits // 8, dtype=torch.uint8), requires_grad=False)
        packed.unquantized_numel = numel
        self.weight, self.bias = packed, like.bias
        scales = numel // _BLOCK if bits == 4 else like.out_features
        self.register_buffer("scales", torch.empty(scales, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        return _QuantizedProduct.apply(hidden, self.weight, (self.out_features, self.in_features), self.bias)


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, packed: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        ctx.shape = shape
        return nn.functional.linear(hidden, hidden.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad @ grad.new_empty(ctx.shape), None, None, None


def quantize(model: nn.Module, bits: Literal[4, 8]) -> None:
    """Replace the linear layers of a model, except its head, as bitsandbytes does."""
    causal: Any = model
    head = causal.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules: list[nn.Module] = list(model.modules())
    for module in modules:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, QuantizedLinear(child, bits))
