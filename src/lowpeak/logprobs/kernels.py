"""Kernels over a chunk's logits: their protocol, and the choice between torch and Triton.

Before Triton's kernels are used on a device, they are compared there with torch's operations on a few logits.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowpeak.logprobs import torch_kernels
from lowpeak.logprobs.reference import ChunkSettings, HeadScale
from lowpeak.logprobs.torch_kernels import LossDerivatives, PairStatistics, SoftmaxStatistics, TeacherLogits
from lowpeak.memory import is_out_of_memory

logger = logging.getLogger(__name__)

_NUM_TOKENS, _NUM_IDS = 5, 3001
_ALLOWED = 1e-4  # of the greatest number: fp32 sums in another order


class LogitsKernels(Protocol):
    """Passes over raw logits [C, V]; the modules `torch_kernels` and `triton_kernels` implement it."""

    def target_logits(
        self, raw_CV: Tensor, bias_V: Tensor | None, targets_C: Tensor, settings: ChunkSettings
    ) -> Tensor: ...

    def softmax_statistics(
        self, raw_CV: Tensor, bias_V: Tensor | None, settings: ChunkSettings
    ) -> SoftmaxStatistics: ...

    def logits_gradient_(
        self,
        raw_CV: Tensor,
        bias_V: Tensor | None,
        settings: ChunkSettings,
        targets_C: Tensor,
        statistics: SoftmaxStatistics,
        derivatives: LossDerivatives,
        narrow_CV: Tensor | None = None,
        extra_CK: Tensor | None = None,
    ) -> Tensor: ...

    def divergences(
        self,
        raw_CK: Tensor,
        bias_K: Tensor | None,
        settings: ChunkSettings,
        teacher: TeacherLogits,
        log_sum_C: Tensor,
        teacher_log_sum_C: Tensor,
    ) -> tuple[Tensor, Tensor]: ...

    def divergence_gradient_(
        self,
        raw_CK: Tensor,
        bias_K: Tensor | None,
        settings: ChunkSettings,
        teacher: TeacherLogits,
        statistics: PairStatistics,
        by_divergence_C: Tensor,
    ) -> Tensor: ...


def kernels_for(logits_CV: Tensor) -> LogitsKernels:
    """Return Triton's kernels for fp32 logits on CUDA if they agree with torch's, else torch's."""
    fake = isinstance(logits_CV, FakeTensor)
    if logits_CV.is_cuda and logits_CV.dtype == torch.float32 and not fake:
        return _cuda_kernels(logits_CV.device)
    return torch_kernels


@cache
def _cuda_kernels(device: torch.device) -> LogitsKernels:
    if find_spec("triton") is None:
        return torch_kernels
    try:
        from lowpeak.logprobs import triton_kernels
    except ImportError as error:
        logger.warning("Computing log-probs without Triton kernels: import failed: %s.", error)
        return torch_kernels
    reason = kernel_mismatch(triton_kernels, device)
    if reason is None:
        return triton_kernels
    logger.warning("Computing log-probs without Triton kernels: %s.", reason)
    return torch_kernels


def triton_mismatch(device: torch.device) -> str | None:
    """Return how the Triton kernels differ from torch's on a device; None if they agree."""
    from lowpeak.logprobs import triton_kernels

    return kernel_mismatch(triton_kernels, device)


def kernel_mismatch(kernels: LogitsKernels, device: torch.device) -> str | None:
    """Return how kernels differ from torch's, with plain settings and with all options; None if they agree."""
    plain = ChunkSettings(_NUM_TOKENS)
    full = ChunkSettings(_NUM_TOKENS, 0.7, HeadScale(0.8, 2.5), entropy=True, entropy_grad=True)
    for settings in (plain, full):
        try:
            pairs = zip(_results(kernels, settings, device), _results(torch_kernels, settings, device), strict=True)
            largest = max(_relative_difference(one, other) for one, other in pairs)
        # A compiler or a driver may raise anything.
        except Exception as error:
            # With more free memory the kernels may be right: no reason to use others for the whole run.
            if is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"
        if not largest <= _ALLOWED:
            return f"they differ from torch's operations by {largest:.2g} of the greatest number"
    return None


def _results(kernels: LogitsKernels, settings: ChunkSettings, device: torch.device) -> list[Tensor]:
    """Return the results of all passes over fixed small logits; each beta has a teacher of fewer ids."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((_NUM_TOKENS, _NUM_IDS), (_NUM_IDS,))
    raw, bias = (4 * torch.randn(*shape, generator=generator).to(device) for shape in shapes)
    targets = torch.randint(_NUM_IDS, (_NUM_TOKENS,), generator=generator).to(device)
    by_logprobs, by_entropy = (torch.randn(_NUM_TOKENS, generator=generator).to(device) for _ in range(2))
    targets[0] = (raw[0] + bias).argmax()
    chosen = kernels.target_logits(raw, bias, targets, settings)
    statistics = kernels.softmax_statistics(raw, bias, settings)
    pairs = [_pair_results(kernels, raw, bias, replace(settings, beta=beta)) for beta in (0.0, 0.5, 1.0)]
    entropy = statistics.entropy()
    derivatives = LossDerivatives(by_logprobs, by_entropy if settings.entropy_grad else None)
    narrow = torch.empty_like(raw, dtype=torch.bfloat16)
    extra = pairs[0][-1]
    gradient = kernels.logits_gradient_(raw, bias, settings, targets, statistics, derivatives, narrow, extra)
    # A bf16 gradient that is within rounding counts as exact.
    rounded = torch.where((narrow - gradient).abs() <= 2**-7 * gradient.abs() + 1e-30, gradient, narrow)
    is_top1 = statistics.is_top1(chosen).float()
    values = [statistics.logprobs(chosen), is_top1, gradient, rounded, *([] if entropy is None else [entropy])]
    return values + [each for results in pairs for each in results]


def _pair_results(kernels: LogitsKernels, raw: Tensor, bias: Tensor, settings: ChunkSettings) -> list[Tensor]:
    """Return divergences and their gradients; the teacher's logits are the student's in another order."""
    num_ids = _NUM_IDS - 1
    teacher = TeacherLogits(raw[:, 1:].contiguous(), bias[1:].contiguous(), settings)
    student = (raw[:, :num_ids], bias[:num_ids], settings)
    log_sums = kernels.softmax_statistics(*student).log_sum(), kernels.softmax_statistics(*teacher).log_sum()
    divergence, center = kernels.divergences(*student, teacher, *log_sums)
    gradient = kernels.divergence_gradient_(*student, teacher, PairStatistics(*log_sums, center), divergence)
    return [divergence, gradient]


def _relative_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference over the greatest number; NaN if either has one."""
    return float((one - other).abs().max() / other.abs().max())
