"""Rows about kernels: each against its definition in fp64, its time beside that of what it replaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lowpeak.attention.install import attend_forest
from lowpeak.attention.layout import ForestLayout
from lowpeak.attention.verify import kernel_differs
from lowpeak.logprobs import rows as torch_rows
from lowpeak.logprobs.agreement import passes_differ
from lowpeak.logprobs.chunked import one_visit, passes_for
from lowpeak.logprobs.definition import ChunkSettings, HeadScale, naive_logprobs
from lowpeak.logprobs.products import project
from lowpeak.logprobs.rows import RowDerivatives
from lowpeak.records import Forest, Tree
from lowpeak.selftest.measure import distance, mib, milliseconds, peak_of
from lowpeak.selftest.table import Bench, require, row

_PLAIN = ChunkSettings(256)
_FULL = ChunkSettings(256, 0.7, HeadScale(0.8, 25.0), entropy=True, entropy_grad=True)
_GRADIENTS_APART = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of their norm
_LOGPROBS_APART = 1e-3  # in nats: the sums are fp32 in both dtypes


@row("log-prob kernels", "a GPU", "Triton")
def logprob_kernels(bench: Bench) -> str:
    """Compare the two Triton kernels with torch's operations, and time both."""
    from lowpeak.logprobs import triton_kernels

    reason = passes_differ(triton_kernels, bench.device)
    require(reason is None, f"the kernels are not used: {reason}")
    shape = bench.pick((1024, 151_936), (2, 5_003))
    told = [
        f"{name} {_pass_times(triton_kernels, settings, shape, bench)} ms (torch's operations "
        f"{_pass_times(torch_rows, settings, shape, bench)})"
        for name, settings in (("plain", _PLAIN), ("soft-cap and entropy", _FULL))
    ]
    return f"statistics and gradient of {shape[0]:,} x {shape[1]:,} logits: {', '.join(told)}"


def _pass_times(passes: Any, settings: ChunkSettings, shape: tuple[int, int], bench: Bench) -> str:
    raw_CV = torch.randn(shape, device=bench.device)
    targets_C = torch.zeros(shape[0], dtype=torch.int64, device=bench.device)
    ones_C = torch.ones(shape[0], device=bench.device)
    statistics = passes.row_statistics(raw_CV, None, settings)
    derivatives = RowDerivatives(ones_C, ones_C if settings.entropy_grad else None, statistics.entropy())
    read = partial(passes.row_statistics, raw_CV, None, settings)
    write = partial(passes.row_gradient_, raw_CV, None, settings, targets_C, statistics, derivatives)
    return " and ".join(f"{milliseconds(call, bench.pick(10, 1)):.2f}" for call in (read, write))


@row("log-prob core", "a GPU", seconds=90)
def logprob_core(bench: Bench) -> str:
    """Compare log-probs and gradients of the fused head with fp64, its time and peak with those of whole logits."""
    torch.manual_seed(0)
    cases = {
        "fp32": (torch.float32, _PLAIN),
        "bf16": (torch.bfloat16, _PLAIN),
        "bf16, soft-cap and entropy": (torch.bfloat16, _FULL),
    }
    if bench.device.type == "cuda":
        passes = passes_for(torch.empty(1, 1, device=bench.device))
        require(passes is not torch_rows, "the core runs without its Triton kernels (see the row log-prob kernels)")
    return "; ".join(f"{name}: {_core(bench, *case)}" for name, case in cases.items())


Head = tuple[Tensor, Tensor, Tensor]  # hidden [T, D], weight [V, D], targets [T]


def _core(bench: Bench, dtype: torch.dtype, settings: ChunkSettings) -> str:
    inputs = _head(bench, dtype, bench.pick(1024, 16))
    few = (inputs[0][:64], inputs[1], inputs[2][:64])
    ours, gradients = _gradients(_fused, few, settings)
    wide = (few[0].double(), few[1].double(), few[2])
    exact, expected = _gradients(_whole_logits, wide, settings)
    plain, _ = _gradients(_whole_logits, few, settings)
    off, plain_off = (float((x - exact).abs().max()) for x in (ours, plain))
    apart = distance(gradients, expected)
    require(off <= _LOGPROBS_APART, f"log-probs in {dtype} are up to {off:.1e} nats off")
    require(apart <= _GRADIENTS_APART[dtype], f"gradients in {dtype} are {apart:.1e} of their size off")
    del wide, exact, expected, gradients
    calls = [partial(_gradients, way, inputs, settings) for way in (_fused, _whole_logits)]
    told = [
        f"{milliseconds(call, bench.pick(10, 1)):.1f} ms and {mib(peak_of(call, bench.device)[1])}" for call in calls
    ]
    return f"log-probs within {off:.0e} (whole logits {plain_off:.0e}), gradients {apart:.0e}, {told[0]} ({told[1]})"


def _head(bench: Bench, dtype: torch.dtype, num_tokens: int) -> Head:
    width, num_ids = bench.pick((1024, 151_936), (32, 5_003))
    hidden_TD = torch.randn(num_tokens, width, device=bench.device).to(dtype)
    weight_VD = (torch.randn(num_ids, width, device=bench.device) * 3 / width**0.5).to(dtype)
    return hidden_TD, weight_VD, torch.randint(num_ids, (num_tokens,), device=bench.device)


Way = Callable[[Tensor, Tensor, Tensor, ChunkSettings], tuple[Tensor, Tensor]]


def _gradients(way: Way, head: Head, settings: ChunkSettings) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probs of a way, and its gradients by hidden states and weight."""
    leaves = [x.detach().requires_grad_() for x in head[:2]]
    loss, logprobs_T = way(leaves[0], leaves[1], head[2], settings)
    return logprobs_T.detach(), list(torch.autograd.grad(loss, leaves))


def _fused(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, settings: ChunkSettings) -> tuple[Tensor, Tensor]:
    loss, logprobs_T, _ = one_visit(
        hidden_TD, weight_VD, None, targets_T, lambda *values: _loss(values[0], values[1], settings), settings
    )
    return loss, logprobs_T


def _whole_logits(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, settings: ChunkSettings
) -> tuple[Tensor, Tensor]:
    logprobs_T, entropy_T = naive_logprobs(hidden_TD, weight_VD, None, targets_T, settings.temperature, settings.scale)
    return _loss(logprobs_T, entropy_T, settings), logprobs_T


def _loss(logprobs_T: Tensor, entropy_T: Tensor | None, settings: ChunkSettings) -> Tensor:
    loss = -logprobs_T.sum()
    return loss - entropy_T.sum() if settings.entropy_grad and entropy_T is not None else loss


@row("bf16 products", "a GPU")
def wide_products(bench: Bench) -> str:
    """Compare bf16 products that have fp32 results with fp64, and their time with that of bf16 results."""
    torch.manual_seed(0)
    hidden_CD, weight_VD, _ = _head(bench, torch.bfloat16, bench.pick(1024, 16))
    out_CV = torch.empty(len(hidden_CD), len(weight_VD), device=bench.device)
    project(out_CV, hidden_CD, weight_VD)
    rows = slice(0, 4096)
    exact = hidden_CD.double() @ weight_VD[rows].double().T
    off, narrow_off = (distance([x[:, rows]], [exact]) for x in (out_CV, hidden_CD @ weight_VD.T))
    require(off <= 1e-5, f"products of bf16 with fp32 results are {off:.1e} of their size off")
    wide = milliseconds(lambda: project(out_CV, hidden_CD, weight_VD), bench.pick(10, 1))
    narrow = milliseconds(lambda: hidden_CD @ weight_VD.T, bench.pick(10, 1))
    teraflops = 2 * out_CV.numel() * hidden_CD.shape[1] / wide / 1e9
    return f"{off:.0e} off (bf16 results {narrow_off:.0e}), {wide:.2f} ms ({narrow:.2f}), {teraflops:.1f} TFLOP/s"


@row("FlexAttention", "a GPU", seconds=180)
def forest_attention(bench: Bench) -> str:
    """Compare attention over a forest with a dense mask, forward and backward, and its time with padded rows."""
    for dtype, width, share in ((torch.bfloat16, 128, 7), (torch.float32, 64, 2)):
        reason = kernel_differs(dtype, bench.device, width, share)
        require(reason is None, str(reason))
    prompt, tokens, count = bench.pick((1024, 512, 8), (24, 8, 4))
    forest = Forest((Tree(0, prompt, (tokens,) * count),), torch.zeros(1, prompt + count * tokens, dtype=torch.int64))
    layout = ForestLayout(forest, bench.device)
    heads = _heads(bench, 1, prompt + count * tokens)
    ours = _attention_time(bench, heads, lambda q, k, v: attend_forest(q, k, v, layout, 128**-0.5))
    padded = _heads(bench, count, prompt + tokens)
    theirs = _attention_time(
        bench, padded, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    )
    return f"a prompt of {prompt:,} with {count} x {tokens} tokens, both ways: {ours:.2f} ms (padded rows {theirs:.2f})"


def _heads(bench: Bench, rows: int, length: int) -> list[Tensor]:
    shapes = [(rows, heads, length, 128) for heads in (14, 2, 2)]
    return [torch.randn(shape, device=bench.device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def _attention_time(bench: Bench, heads: list[Tensor], attend: Callable[..., Tensor]) -> float:
    return milliseconds(lambda: torch.autograd.grad(attend(*heads).sum(), heads), bench.pick(10, 1))
