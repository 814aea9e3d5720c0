"""Attention over a forest on CPUs: a completion's two parts, its prompt and itself, merged by their log-sum-exps.

Per tree the prompt attends to itself, each completion to itself, and all completions together to the prompt, each a
call of torch's CPU flash attention, so that no masked block costs time and the prompt's keys are read once. With lse_a
and lse_b of the two parts and lse = log(exp(lse_a) + exp(lse_b)), the whole is

    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

and because flash attention's backward forms p = exp(score - lse) and D = sum(grad_out * out) from what it is given, a
part's backward called with the merged `out` and `lse` returns that part's share of the exact gradient (as in Ring
Attention, Liu et al., 2023, arXiv:2310.01889).

H query heads share K key heads, R = H / K each. Heads are folded into the batch, [R, K, L, E], so that keys and values
are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lowpeak.records import Tree

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def merged_attention(
    query_1HLE: Tensor, key_1KLE: Tensor, value_1KLE: Tensor, trees: tuple[Tree, ...], scale: float
) -> Tensor:
    """[1, L, H, E]: softmax(scale * query key^T + log(forest_mask)) value; zeros where a token sees nothing."""
    return _MergedAttention.apply(query_1HLE, key_1KLE, value_1KLE, trees, scale)


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, trees: tuple[Tree, ...], scale: float
    ) -> Tensor:
        out_1LHE = torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        lse_dtype = torch.promote_types(query.dtype, torch.float32)
        folded, keys, values = _fold(query, key.shape[1]), _share(key, query), _share(value, query)
        out = _fold(out_1LHE.transpose(1, 2), key.shape[1])
        lse = torch.zeros(out.shape[0], out.shape[2], out.shape[1], dtype=lse_dtype, device=out.device).transpose(1, 2)
        for rows, columns, causal in _parts(trees):
            part, part_lse = _flash(
                folded[:, :, rows], keys[:, :, columns], values[:, :, columns], 0.0, causal, scale=scale
            )
            if causal:
                out[:, :, rows], lse[:, :, rows] = part, part_lse
            else:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        ctx.save_for_backward(query, key, value, out_1LHE, lse)
        ctx.trees, ctx.scale = trees, scale  # type: ignore[attr-defined]
        return out_1LHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1LHE: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_1LHE, lse = ctx.saved_tensors
        num_kv = key.shape[1]
        folded, keys, values = _fold(query, num_kv), _share(key, query), _share(value, query)
        out, grad = _fold(out_1LHE.transpose(1, 2), num_kv), _fold(grad_1LHE.contiguous().transpose(1, 2), num_kv)
        grad_query, grad_key, grad_value = _zeros(query), _zeros(key), _zeros(value)
        grad_folded = _fold(grad_query, num_kv)
        for rows, columns, causal in _parts(ctx.trees):
            part_query, part_key, part_value = _flash_backward(
                grad[:, :, rows], folded[:, :, rows], keys[:, :, columns], values[:, :, columns],
                out[:, :, rows], lse[:, :, rows], 0.0, causal, scale=ctx.scale,
            )  # fmt: skip
            grad_folded[:, :, rows] += part_query
            grad_key[0, :, columns] += part_key.sum(0)
            grad_value[0, :, columns] += part_value.sum(0)
        return grad_query, grad_key, grad_value, None, None


def _parts(trees: tuple[Tree, ...]) -> Iterator[tuple[slice, slice, bool]]:
    """Rows and columns of the mask's blocks that are not empty, and whether a block is causal; own blocks first."""
    for tree in trees:
        start = tree.start
        for tokens in (tree.prompt, *tree.completions):
            if tokens:
                own = slice(start, start + tokens)
                yield own, own, True
            start += tokens
        if tree.prompt:
            answers = tree.start + tree.prompt
            yield slice(answers, tree.start + tree.num_tokens), slice(tree.start, answers), False


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add another part of the keys to `out` and `lse`, in place, in at least fp32."""
    total = torch.logaddexp(lse, other_lse)
    share = (other_lse - total).exp_().unsqueeze(-1)
    out.copy_(torch.lerp(out.to(share.dtype), other.to(share.dtype), share))
    lse.copy_(total)


def _fold(heads: Tensor, num_kv: int) -> Tensor:
    """[1, H, L, E] as [R, K, L, E], a view: query head k * R + r reads key head k."""
    return heads[0].unflatten(0, (num_kv, -1)).transpose(0, 1)


def _share(heads: Tensor, query: Tensor) -> Tensor:
    """[1, K, L, E] as [R, K, L, E], each R the same memory."""
    return heads.expand(query.shape[1] // heads.shape[1], -1, -1, -1)


def _zeros(heads: Tensor) -> Tensor:
    """Zeros [1, H, L, E] laid out as the projections are, [1, L, H, E]."""
    return torch.zeros_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
