"""Queries, keys and values over a forest, and the attention to them that the definition's dense mask gives."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from forests import length_of
from lowpeak.attention.definition import forest_mask

HEADS = {"a key head each": (4, 4), "grouped": (6, 2), "one key head": (4, 1)}
SCALE = 0.3


def heads(forest, num_heads, num_kv, dtype=torch.float64, width=16, value_width=16):
    """Query, key and value as a layer makes them: projected together, then transposed."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_heads, width), (num_kv, width), (num_kv, value_width))
    drawn = [torch.randn(1, length_of(forest), *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).transpose(1, 2).detach().requires_grad_() for x in drawn]


def dense(query, key, value, forest):
    """Attention under the definition's mask; zeros where a token sees nothing."""
    mask = forest_mask(forest, length_of(forest))
    real = mask.any(1)
    mask = mask | ~real[:, None]
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2) * real[:, None, None]


def values_and_gradients(attend, tensors):
    out = attend(*tensors)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]
