"""Tests of kernels on one device: the head, attention and the optimizer's step against references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from lowpeak.attention import attention_mismatch
from lowpeak.logprobs import (
    ChunkSettings,
    HeadScale,
    TeacherHead,
    fused_loss,
    naive_divergence,
    naive_logprobs,
    triton_mismatch,
)
from lowpeak.optim import MOMENTS, CompactAdamW, step_kernel
from lowpeak.selftest.memory import peak_of
from lowpeak.selftest.models import mib
from lowpeak.selftest.table import Bench, require, row

_PLAIN = ChunkSettings(256)
_FULL = ChunkSettings(256, 0.7, HeadScale(0.8, 25.0), entropy=True, entropy_grad=True)
_CASES = {
    "fp32": (torch.float32, _PLAIN),
    "bf16": (torch.bfloat16, _PLAIN),
    "bf16, soft-cap and entropy": (torch.bfloat16, _FULL),
}
_GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative to their norm
_LOGPROB_TOLERANCE = 1e-3  # in nats; sums are fp32 in both dtypes
_HEAD_WIDTHS = (64, 128, 256)


class Format(NamedTuple):
    """A storage format, and how far its updates may be from those of torch's AdamW on fp32 weights."""

    weight_bits: Literal[16, 24, 32] | None
    state_bits: Literal[8, 32]
    tolerance: float

    def __str__(self) -> str:
        return f"{self.weight_bits or 'fp32'}/{self.state_bits}"


# Relative to the norm of the updates; on a CPU 2e-7 with fp32 states, 6e-3 with those of 8 bits, 0.2 with bf16 weights alone.
_FORMATS = (
    Format(None, 32, 1e-5),
    Format(None, 8, 0.03),
    Format(32, 32, 1e-5),
    Format(32, 8, 0.03),
    Format(24, 8, 0.03),
    Format(16, 8, 0.5),
)
_KERNEL_TOLERANCE = 1e-3  # codes of 8 bits may differ by one where a value is halfway between two
_NUM_STEPS = 8

Head = tuple[Tensor, Tensor, Tensor]  # hidden [T, D], weight [V, D], targets [T]
Way = Callable[[Tensor, Tensor, Tensor, ChunkSettings], tuple[Tensor, Tensor]]


@row("log-prob kernels", "a GPU", "Triton", quick=True)
def logprob_kernels(bench: Bench) -> str:
    """Compare the Triton kernels with torch operations."""
    reason = triton_mismatch(bench.device)
    require(reason is None, f"the kernels cannot be used: {reason}")
    return "statistics and gradients equal those of torch operations"


@row("log-prob core", seconds=90)
def logprob_core(bench: Bench) -> str:
    """Compare the fused head's log-probs and gradients with fp64, and its time and peak memory with full logits."""
    torch.manual_seed(0)
    size = bench.pick((1024, 151_936), (32, 5_003))
    return "; ".join(f"{name}: {_compare_head(bench, name, *case, *size)}" for name, case in _CASES.items())


@row("log-prob head of 7B", seconds=120)
def large_head(bench: Bench) -> str:
    """Compare the head of a 7B model with 151,936 ids, in bf16, as `log-prob core` does."""
    torch.manual_seed(0)
    return _compare_head(bench, "bf16", torch.bfloat16, _PLAIN, *bench.pick((3584, 151_936), (112, 5_003)))


@row("divergence of a teacher", seconds=120)
def teacher_divergence(bench: Bench) -> str:
    """Compare the fused head's divergences and gradients with fp64 logits of both models: forward KL, JSD, reverse KL."""
    torch.manual_seed(0)
    cases = [(beta, dtype) for beta in (0.0, 0.5, 1.0) for dtype in (torch.float32, torch.bfloat16)]
    return "; ".join(_compare_divergence(bench, *case) for case in cases)


def _compare_divergence(bench: Bench, beta: float, dtype: torch.dtype) -> str:
    width, num_ids = bench.pick((1024, 151_936), (32, 5_003))
    teacher_width = 2 * width
    student_TD, teacher_TE = (torch.randn(64, size, device=bench.device).to(dtype) for size in (width, teacher_width))
    weight_VD, head_VE = (
        (torch.randn(num_ids, size, device=bench.device) * 3 / size**0.5).to(dtype) for size in (width, teacher_width)
    )
    targets_T = torch.randint(num_ids, (64,), device=bench.device)
    settings = replace(_PLAIN, teacher=TeacherHead(teacher_TE, head_VE), beta=beta)
    leaves = [student_TD.requires_grad_(), weight_VD.requires_grad_()]
    loss, *results = fused_loss(leaves[0], leaves[1], None, targets_T, lambda *values: values[-1].sum(), settings)
    gradients = torch.autograd.grad(loss, leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_T = naive_divergence(wide[0] @ wide[1].T, teacher_TE.double() @ head_VE.double().T, beta)
    expected = torch.autograd.grad(exact_T.sum(), wide)
    found_T = results[-1]
    assert found_T is not None, "the settings have a teacher"
    error = float((found_T - exact_T.detach()).abs().max())
    gradient_error = _relative_error(gradients, expected)
    name = f"beta {beta:g} in {str(dtype).removeprefix('torch.')}"
    require(error <= _LOGPROB_TOLERANCE, f"{name}: divergences have an error of {error:.1e} nats")
    require(
        gradient_error <= _GRADIENT_TOLERANCE[dtype], f"{name}: gradients have a relative error of {gradient_error:.1e}"
    )
    bench.record(**{name: {"error": error, "gradient_error": gradient_error}})
    return f"{name}: within {error:.0e}, gradients {gradient_error:.0e}"


def _compare_head(
    bench: Bench, name: str, dtype: torch.dtype, settings: ChunkSettings, width: int, num_ids: int
) -> str:
    num_tokens = bench.pick(1024, 16)
    hidden_TD = torch.randn(num_tokens, width, device=bench.device).to(dtype)
    weight_VD = (torch.randn(num_ids, width, device=bench.device) * 3 / width**0.5).to(dtype)
    targets_T = torch.randint(num_ids, (num_tokens,), device=bench.device)
    logprobs, gradients = _gradients(_fused, (hidden_TD[:64], weight_VD, targets_T[:64]), settings)
    wide = (hidden_TD[:64].double(), weight_VD.double(), targets_T[:64])
    exact, expected = _gradients(_full_logits, wide, settings)
    logprob_error = float((logprobs - exact).abs().max())
    gradient_error = _relative_error(gradients, expected)
    require(logprob_error <= _LOGPROB_TOLERANCE, f"log-probs in {dtype} have an error of {logprob_error:.1e} nats")
    require(
        gradient_error <= _GRADIENT_TOLERANCE[dtype],
        f"gradients in {dtype} have a relative error of {gradient_error:.1e}",
    )
    del wide, exact, expected, gradients
    inputs = (hidden_TD, weight_VD, targets_T)
    calls = [partial(_gradients, way, inputs, settings) for way in (_fused, _full_logits)]
    (ms, peak), (full_ms, full_peak) = ((milliseconds(call, bench), peak_of(call, bench)) for call in calls)
    measured = {"logprob_error": logprob_error, "gradient_error": gradient_error, "ms": ms, "peak_bytes": peak}
    bench.record(**{name: {**measured, "full_logits_ms": full_ms, "full_logits_peak_bytes": full_peak}})
    return (
        f"log-probs within {logprob_error:.0e}, gradients {gradient_error:.0e}, {ms:.1f} ms and {mib(peak)} "
        f"(full logits {full_ms:.1f} ms and {mib(full_peak)})"
    )


def _relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest norm of a difference from the exact tensor, over that tensor's norm."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def _gradients(way: Way, head: Head, settings: ChunkSettings) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probs of an implementation, and its gradients by hidden states and weight."""
    leaves = [x.detach().requires_grad_() for x in head[:2]]
    loss, logprobs_T = way(leaves[0], leaves[1], head[2], settings)
    return logprobs_T.detach(), list(torch.autograd.grad(loss, leaves))


def _fused(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, settings: ChunkSettings) -> tuple[Tensor, Tensor]:
    def loss_of(*values: Any) -> Tensor:
        return _loss(values[0], values[1], settings)

    loss, logprobs_T, *_ = fused_loss(hidden_TD, weight_VD, None, targets_T, loss_of, settings)
    return loss, logprobs_T


def _full_logits(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, settings: ChunkSettings
) -> tuple[Tensor, Tensor]:
    logprobs_T, entropy_T = naive_logprobs(hidden_TD, weight_VD, None, targets_T, settings.temperature, settings.scale)
    return _loss(logprobs_T, entropy_T, settings), logprobs_T


def _loss(logprobs_T: Tensor, entropy_T: Tensor | None, settings: ChunkSettings) -> Tensor:
    loss = -logprobs_T.sum()
    return loss - entropy_T.sum() if settings.entropy_grad and entropy_T is not None else loss


@row("FlexAttention", seconds=300)
def forest_attention(bench: Bench) -> str:
    """Compare attention over sequences with shared prompts with a dense mask in fp64, forward and backward."""
    cases = ((torch.bfloat16, 128, 7), (torch.float32, 64, 2))
    for case in cases:
        reason = attention_mismatch(case[0], bench.device, *case[1:])
        require(reason is None, str(reason))
    return "values and gradients equal those of a dense mask in bf16 (head size 128) and fp32 (head size 64)"


@row("FlexAttention by head size", seconds=600, in_default_run=False)
def head_sizes(bench: Bench) -> str:
    """Compare attention as `FlexAttention` does for each head size and dtype; where it fails, runs pad their rows."""
    reasons = {
        f"{str(dtype).removeprefix('torch.')}, {width}": attention_mismatch(dtype, bench.device, width, 7)
        for dtype in (torch.bfloat16, torch.float32)
        for width in _HEAD_WIDTHS
    }
    bench.record(**{case: reason or "ok" for case, reason in reasons.items()})
    failures = [f"{case}: {reason}" for case, reason in reasons.items() if reason]
    require(not failures, "; ".join(failures))
    return f"values and gradients equal those of a dense mask in bf16 and fp32 for head sizes {_HEAD_WIDTHS}"


@row("storage formats", seconds=120)
def storage_formats(bench: Bench) -> str:
    """Compare weights and states after steps in each format: the kernel's with torch's, and both with fp32 AdamW."""
    return "; ".join(f"{each}: {_compare_format(bench, each)}" for each in _FORMATS)


def _compare_format(bench: Bench, each: Format) -> str:
    generator = torch.Generator().manual_seed(0)
    shape = bench.pick((4096, 2048), (70, 200))
    dtype = torch.float32 if each.weight_bits is None else torch.bfloat16
    start, *gradients = (torch.randn(shape, generator=generator).to(bench.device, dtype) for _ in range(1 + _NUM_STEPS))
    weight = nn.Parameter(start.to(torch.float32, copy=True))
    adamw = torch.optim.AdamW([weight], lr=1e-2)
    for gradient in gradients:
        weight.grad = gradient.float()
        adamw.step()
    expected = weight.detach() - start.float()
    kernel = step_kernel(start)
    require(kernel is not None or not bench.on_gpu, f"{each}: the optimizer steps without a Triton kernel")
    runs = [_step_in_format(each, start, gradients, by) for by in ((kernel, None) if bench.on_gpu else (None,))]
    found, by_torch = runs[0], runs[-1]
    differences = [_relative(one, other) for one, other in zip(found[1:], by_torch[1:], strict=True)]
    from_kernel = max(*differences, _relative(found[0] - start.float(), by_torch[0] - start.float()))
    error = _relative(found[0] - start.float(), expected)
    bench.record(**{str(each): {"kernel_difference": from_kernel, "difference_from_fp32": error}})
    require(
        from_kernel <= _KERNEL_TOLERANCE, f"{each}: the kernel differs from torch's operations by {from_kernel:.1e}"
    )
    require(error <= each.tolerance, f"{each}: updates differ from those of fp32 AdamW by {error:.1e}")
    compared = f", kernel {from_kernel:.0e} from torch's operations" if bench.on_gpu else ""
    return f"{error:.0e} from fp32 AdamW{compared}"


def _step_in_format(each: Format, start: Tensor, gradients: list[Tensor], kernel: Any) -> list[Tensor]:
    """Return the weights and moments in fp32 after a step per gradient, by a kernel or (None) torch's operations."""
    weight = nn.Parameter(start.clone())
    optimizer = CompactAdamW([weight], lr=1e-2, weight_bits=each.weight_bits, state_bits=each.state_bits)
    with torch.no_grad():
        for gradient in gradients:
            optimizer.update_tensor(weight, gradient.view(-1), optimizer.param_groups[0], kernel)
    return [optimizer.read(weight, key, 0, weight.numel()).view_as(weight) for key in ("weight", *MOMENTS)]


def _relative(one: Tensor, other: Tensor) -> float:
    """Return the distance of two tensors over the norm of the second."""
    return float((one - other).norm() / other.norm())


def milliseconds(call: Callable[[], object], bench: Bench) -> float:
    """Return the mean time of a synchronised call in ms, after two warm-up calls."""
    timer = Timer("call()", globals={"call": call})
    timer.timeit(2)
    return 1000 * timer.timeit(bench.pick(10, 1)).mean
