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
        num_kv = key.shape[1]
        folded, keys, values = _fold(query, num_kv), _share(key, query), _share(value, query)
        out_1HLE = _fresh(query, trees)
        out, lse = _fold(out_1HLE, num_kv), _fresh_lse(folded)
        for rows, columns, own in _parts(trees):
            part, part_lse = _flash(
                folded[:, :, rows], keys[:, :, columns], values[:, :, columns], 0.0, own, scale=scale
            )
            if own:
                out[:, :, rows], lse[:, :, rows] = part, part_lse
            else:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        out_1LHE = out_1HLE.transpose(1, 2)
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
        grads = [_fresh(x, ctx.trees) for x in (query, key, value)]
        grad_folded, grad_key, grad_value = _fold(grads[0], num_kv), grads[1][0], grads[2][0]
        for rows, columns, own in _parts(ctx.trees):
            part_query, part_key, part_value = _flash_backward(
                grad[:, :, rows], folded[:, :, rows], keys[:, :, columns], values[:, :, columns],
                out[:, :, rows], lse[:, :, rows], 0.0, own, scale=ctx.scale,
            )  # fmt: skip
            _put(grad_folded[:, :, rows], part_query, own)
            _put(grad_key[:, columns], _over_shares(part_key), own)
            _put(grad_value[:, columns], _over_shares(part_value), own)
        return *grads, None, None


def _parts(trees: tuple[Tree, ...]) -> Iterator[tuple[slice, slice, bool]]:
    """Rows and columns of the mask's blocks that are not empty, and whether it is a token's own (causal) block."""
    for tree in trees:
        start = tree.start
        for tokens in (tree.prompt, *tree.completions):
            if tokens:
                own = slice(start, start + tokens)
                yield own, own, True
            start += tokens
        if 0 < tree.prompt < tree.num_tokens:
            answers = tree.start + tree.prompt
            yield slice(answers, tree.start + tree.num_tokens), slice(tree.start, answers), False


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add another part of the keys to `out` and `lse`, in place, in at least fp32."""
    total = torch.logaddexp(lse, other_lse)
    share = (other_lse - total).exp_().unsqueeze(-1)
    if out.dtype == share.dtype:
        out.lerp_(other, share)
    else:
        out.copy_(torch.lerp(out.to(share.dtype), other.to(share.dtype), share))
    lse.copy_(total)


def _fold(heads: Tensor, num_kv: int) -> Tensor:
    """[1, H, L, E] as [R, K, L, E], a view: query head k * R + r reads key head k."""
    return heads[0].unflatten(0, (num_kv, -1)).transpose(0, 1)


def _share(heads: Tensor, query: Tensor) -> Tensor:
    """[1, K, L, E] as [R, K, L, E], each R the same memory."""
    return heads.expand(query.shape[1] // heads.shape[1], -1, -1, -1)


def _over_shares(grad: Tensor) -> Tensor:
    """[R, K, L, E] summed to [K, L, E]."""
    return grad[0] if grad.shape[0] == 1 else grad.sum(0)


def _put(target: Tensor, part: Tensor, own: bool) -> None:
    """Every token has one own block, which comes before what is added to it."""
    if own:
        target.copy_(part)
    else:
        target.add_(part)


def _fresh(heads: Tensor, trees: tuple[Tree, ...]) -> Tensor:
    """Memory for [1, H, L, E] laid out as projections are, [1, L, H, E]; zeros where there is padding to leave out."""
    filled = sum(tree.num_tokens for tree in trees) == heads.shape[2]
    new = torch.empty_like if filled else torch.zeros_like
    return new(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _fresh_lse(folded: Tensor) -> Tensor:
    """Memory for [R, K, L], laid out as the kernel writes it, [R, L, K]."""
    repeats, num_kv, length, _ = folded.shape
    dtype = torch.promote_types(folded.dtype, torch.float32)
    return torch.zeros(repeats, length, num_kv, dtype=dtype, device=folded.device).transpose(1, 2)
