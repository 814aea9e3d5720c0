"""Attention over a forest on CPUs: a completion's two parts, its prompt and itself, merged by their log-sum-exps.

Per tree the prompt attends to itself, each completion to itself, and all completions together to the prompt, each a
call of torch's CPU flash attention, so that no masked block costs time and the prompt's keys are read once. With lse_a
and lse_b of the two parts and lse = log(exp(lse_a) + exp(lse_b)), the whole is

    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

and because flash attention's backward forms p = exp(score - lse) and D = sum(grad_out * out) from what it is given, a
part's backward called with the merged `out` and `lse` returns that part's share of the exact gradient (as in Ring
Attention, Liu et al., 2023, arXiv:2310.01889).

Which blocks of the mask are a call each and which are calls together is in `calls`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lowpeak.attention.calls import Calls, calls_of
from lowpeak.records import Tree

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def merged_attention(
    query_1HLE: Tensor,
    key_1KLE: Tensor,
    value_1KLE: Tensor,
    trees: tuple[Tree, ...],
    scale: float,
    calls: Calls | None = None,
) -> Tensor:
    """[1, L, H, E]: softmax(scale * query key^T + log(forest_mask)) value; zeros where a token sees nothing.

    `calls` is `calls_of` the trees, for who has it from another layer.
    """
    _, num_heads, length, width = query_1HLE.shape
    if calls is None:
        calls = calls_of(trees, length, num_heads * width, query_1HLE.device)
    filled = sum(tree.num_tokens for tree in trees) == length
    return _MergedAttention.apply(query_1HLE, key_1KLE, value_1KLE, calls, filled, scale)


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, calls: Calls, filled: bool, scale: float
    ) -> Tensor:
        query_LHE, key_LKE, value_LKE = (x[0].transpose(0, 1) for x in (query, key, value))
        num_kv = key_LKE.shape[1]
        repeats = query_LHE.shape[1] // num_kv
        out_LHE, lse_LH1 = _fresh(query_LHE, filled), _fresh_lse(query_LHE)
        for call in calls:
            part, part_lse = _flash(
                call.queries(query_LHE, num_kv), call.keys(key_LKE, repeats), call.keys(value_LKE, repeats),
                0.0, call.own, scale=scale,
            )  # fmt: skip
            if call.own:
                call.put_queries(out_LHE, part, num_kv)
                call.put_queries(lse_LH1, part_lse.unsqueeze(-1), num_kv)
            else:
                call.merge(out_LHE, lse_LH1, part, part_lse, num_kv)
        out_1LHE = out_LHE[:-1].unsqueeze(0)
        ctx.save_for_backward(query, key, value, out_1LHE, lse_LH1)
        ctx.calls, ctx.filled, ctx.scale = calls, filled, scale  # type: ignore[attr-defined]
        return out_1LHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1LHE: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_1LHE, lse_LH1 = ctx.saved_tensors
        query_LHE, key_LKE, value_LKE = (x[0].transpose(0, 1) for x in (query, key, value))
        out_LHE, grad_LHE = out_1LHE[0], grad_1LHE[0].contiguous()
        num_kv = key_LKE.shape[1]
        repeats = query_LHE.shape[1] // num_kv
        grad_query, grad_key, grad_value = (_fresh(x, ctx.filled) for x in (query_LHE, key_LKE, value_LKE))
        for call in ctx.calls:
            part_query, part_key, part_value = _flash_backward(
                call.gradients(grad_LHE, num_kv), call.queries(query_LHE, num_kv),
                call.keys(key_LKE, repeats), call.keys(value_LKE, repeats),
                call.queries(out_LHE, num_kv), call.queries(lse_LH1, num_kv).squeeze(-1), 0.0, call.own,
                scale=ctx.scale,
            )  # fmt: skip
            call.put_queries(grad_query, part_query, num_kv)
            call.put_keys(grad_key, part_key)
            call.put_keys(grad_value, part_value)
        grads = [grad[:-1].transpose(0, 1).unsqueeze(0) for grad in (grad_query, grad_key, grad_value)]
        return *grads, None, None, None


def _fresh(x_LHE: Tensor, filled: bool) -> Tensor:
    """Memory for [L, H, E] and a row behind it; zeros where there is padding to leave out."""
    new = torch.empty if filled else torch.zeros
    return new(x_LHE.shape[0] + 1, *x_LHE.shape[1:], dtype=x_LHE.dtype, device=x_LHE.device)


def _fresh_lse(query_LHE: Tensor) -> Tensor:
    """Memory for [L, H, 1], and a row behind it, in at least fp32."""
    dtype = torch.promote_types(query_LHE.dtype, torch.float32)
    return torch.zeros(query_LHE.shape[0] + 1, query_LHE.shape[1], 1, dtype=dtype, device=query_LHE.device)
