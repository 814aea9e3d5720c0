"""The passes of `torch_kernels.py` over a chunk's raw logits as Triton kernels, one program per token.

`softmax_statistics` reads [C, V] once; `logits_gradient_` reads and writes it once, and can also write bf16 for products
in the tensor cores. `divergences` and `divergence_gradient_` read the student's and the teacher's [C, K]. Imported on CUDA
only, where torch installs Triton (or with TRITON_INTERPRET=1, without a GPU).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowpeak.logprobs import triton_programs
from lowpeak.logprobs.reference import ChunkSettings
from lowpeak.logprobs.torch_kernels import LossDerivatives, PairStatistics, SoftmaxStatistics, TeacherLogits

_BLOCK = 4096  # ids at a time
_PAIR_BLOCK = 2048  # with a teacher's logits
_NUM_WARPS = 8


def target_logits(raw_CV: Tensor, bias_V: Tensor | None, targets_C: Tensor, settings: ChunkSettings) -> Tensor:
    """Return the final logits of the targets: [C]."""
    # Computed as in `softmax_statistics`, to the bit: `is_top1` compares them with its maximum.
    chosen_C = raw_CV.new_empty(len(raw_CV))
    if len(raw_CV):
        with torch.cuda.device_of(raw_CV):
            triton_programs.chosen[(len(raw_CV),)](
                raw_CV,
                raw_CV if bias_V is None else bias_V,
                targets_C.contiguous(),
                chosen_C,
                raw_CV.stride(0),
                **_finish_arguments(bias_V, settings),
            )
    return chosen_C


def softmax_statistics(raw_CV: Tensor, bias_V: Tensor | None, settings: ChunkSettings) -> SoftmaxStatistics:
    """Return each token's sums over the vocabulary; reads `raw` once and leaves it unchanged."""
    num_tokens, num_ids = raw_CV.shape
    max_C, sum_C, dot_C = (raw_CV.new_empty(num_tokens) for _ in range(3))
    if num_tokens:
        with torch.cuda.device_of(raw_CV):
            triton_programs.statistics[(num_tokens,)](
                raw_CV,
                raw_CV if bias_V is None else bias_V,
                max_C,
                sum_C,
                dot_C,
                raw_CV.stride(0),
                num_ids,
                **_finish_arguments(bias_V, settings),
                WITH_DOT=settings.entropy,
                BLOCK=_BLOCK,
                num_warps=_NUM_WARPS,
            )
    return SoftmaxStatistics(max_C, sum_C, dot_C if settings.entropy else None)


def logits_gradient_(
    raw_CV: Tensor,
    bias_V: Tensor | None,
    settings: ChunkSettings,
    targets_C: Tensor,
    statistics: SoftmaxStatistics,
    derivatives: LossDerivatives,
    narrow_CV: Tensor | None = None,
    extra_CK: Tensor | None = None,
) -> Tensor:
    """Overwrite raw logits with the loss's gradient by them and return it; copy it into `narrow` if given.

    Ranges of the vocabulary and `extra` are as in `torch_kernels`.
    """
    num_tokens, num_ids = raw_CV.shape
    a_C, b_C, k_C = derivatives.coefficients(statistics, settings.gain)
    if num_tokens:
        with torch.cuda.device_of(raw_CV):
            triton_programs.gradient[(num_tokens,)](
                raw_CV,
                raw_CV if bias_V is None else bias_V,
                raw_CV if narrow_CV is None else narrow_CV,
                raw_CV if extra_CK is None else extra_CK,
                targets_C.contiguous(),
                statistics.max_C,
                a_C.contiguous(),
                b_C.contiguous(),
                b_C if k_C is None else k_C.contiguous(),
                raw_CV.stride(0),
                0 if narrow_CV is None else narrow_CV.stride(0),
                0 if extra_CK is None else extra_CK.stride(0),
                num_ids,
                0 if extra_CK is None else extra_CK.shape[1],
                **_finish_arguments(bias_V, settings),
                WITH_ENTROPY=k_C is not None,
                WITH_NARROW=narrow_CV is not None,
                WITH_EXTRA=extra_CK is not None,
                BLOCK=_BLOCK,
                num_warps=_NUM_WARPS,
            )
    return raw_CV


def divergences(
    raw_CK: Tensor,
    bias_K: Tensor | None,
    settings: ChunkSettings,
    teacher: TeacherLogits,
    log_sum_C: Tensor,
    teacher_log_sum_C: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return each token's divergence and the center of its gradient, [C] and [C]; reads both logits once."""
    divergence_C, center_C = torch.empty_like(log_sum_C), torch.empty_like(log_sum_C)
    inputs = (log_sum_C, teacher_log_sum_C, divergence_C, center_C)
    _run_pair(triton_programs.divergences, raw_CK, bias_K, settings, teacher, inputs)
    return divergence_C, center_C


def divergence_gradient_(
    raw_CK: Tensor,
    bias_K: Tensor | None,
    settings: ChunkSettings,
    teacher: TeacherLogits,
    statistics: PairStatistics,
    by_divergence_C: Tensor,
) -> Tensor:
    """Overwrite the teacher's raw logits with the loss's gradient by the student's, without a cap's; return it."""
    gain_C = by_divergence_C * settings.gain
    _run_pair(triton_programs.divergence_gradient, raw_CK, bias_K, settings, teacher, (*statistics, gain_C))
    return teacher.raw_CK


def _run_pair(
    kernel: Any,
    raw_CK: Tensor,
    bias_K: Tensor | None,
    settings: ChunkSettings,
    teacher: TeacherLogits,
    per_token: tuple[Tensor, ...],
) -> None:
    of_teacher = _finish_arguments(teacher.bias_K, teacher.settings)
    if not len(raw_CK):
        return
    with torch.cuda.device_of(raw_CK):
        kernel[(len(raw_CK),)](
            raw_CK,
            raw_CK if bias_K is None else bias_K,
            teacher.raw_CK,
            raw_CK if teacher.bias_K is None else teacher.bias_K,
            *(each.contiguous() for each in per_token),
            raw_CK.stride(0),
            teacher.raw_CK.stride(0),
            raw_CK.shape[1],
            beta=settings.beta,
            **_finish_arguments(bias_K, settings),
            teacher_inner=of_teacher["inner"],
            teacher_outer=of_teacher["outer"],
            TEACHER_WITH_BIAS=of_teacher["WITH_BIAS"],
            TEACHER_WITH_CAP=of_teacher["WITH_CAP"],
            IS_FORWARD=settings.beta == 0,
            IS_MIXTURE=0 < settings.beta < 1,
            BLOCK=_PAIR_BLOCK,
            num_warps=_NUM_WARPS,
        )


def _finish_arguments(bias_V: Tensor | None, settings: ChunkSettings) -> dict[str, Any]:
    """Return the arguments of z = outer * tanh(inner * (x + bias)) with a cap, else z = inner * (x + bias)."""
    cap = settings.scale.softcap
    inner = settings.gain if cap is None else settings.scale.logit_scale / cap
    outer = 1.0 if cap is None else cap / settings.temperature
    return {"inner": inner, "outer": outer, "WITH_BIAS": bias_V is not None, "WITH_CAP": cap is not None}
