"""Divergences of a student's next-token distributions from a teacher's, chunk by chunk.

`reference.naive_divergence` is the naive equivalent. A chunk has a second buffer, with the teacher's logits, in which the
gradient by the student's logits is formed: nothing has the shape [T, K], and the teacher gets no gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowpeak.logprobs.kernels import LogitsKernels, kernels_for
from lowpeak.logprobs.matmul import project
from lowpeak.logprobs.reference import ChunkSettings, TeacherHead
from lowpeak.logprobs.torch_kernels import PairStatistics, SoftmaxStatistics, TeacherLogits


class TeacherChunks:
    """A teacher's head run on the chunks of a student's, in a buffer as large as the student's logits.

    `load` computes the teacher's logits of a chunk, which `forward` or `gradient` then uses:

        teacher.load(chunk, rows)
        divergence_C = teacher.forward(raw_CV, bias_V, settings, statistics_C)
        grad_CK = teacher.gradient(raw_CV, bias_V, settings, teacher.statistics[-1], by_divergence_C)
    """

    def __init__(
        self, teacher: TeacherHead, num_rows: int, settings: ChunkSettings, logits: Tensor, kernels: LogitsKernels
    ) -> None:
        self.num_ids = teacher.num_common(num_rows)
        self.statistics: list[PairStatistics] = []
        self._teacher, self._kernels = teacher, kernels
        self._settings = ChunkSettings(settings.chunk_size, settings.temperature, teacher.scale)
        self._buffer = torch.empty_like(logits)
        self._loaded: TeacherLogits | None = None

    @torch.no_grad()
    def load(self, chunk: slice, rows: slice) -> None:
        """Write the logits of a chunk's tokens and of the compared ids in `rows` into the buffer."""
        rows = slice(rows.start, min(rows.stop, self.num_ids))
        shape = (chunk.stop - chunk.start, rows.stop - rows.start)
        if shape[1] <= 0:
            self._loaded = None
            return
        raw_CK, head = self._buffer[: shape[0] * shape[1]].view(shape), self._teacher.head
        hidden_CE = self._teacher.hidden_TE[chunk]
        if isinstance(head, Tensor):
            project(raw_CK, hidden_CE, head[rows])
        else:
            # A stripe's chunk can have all tokens, whose logits of all ids would not fit.
            for part, part_CE in zip(*(x.split(self._settings.chunk_size) for x in (raw_CK, hidden_CE)), strict=True):
                part.copy_(head(part_CE)[:, rows])
        bias_W = self._teacher.bias_W
        self._loaded = TeacherLogits(raw_CK, None if bias_W is None else bias_W[rows], self._settings)

    def forward(
        self, raw_CV: Tensor, bias_V: Tensor | None, settings: ChunkSettings, statistics_C: SoftmaxStatistics
    ) -> Tensor:
        """Return the loaded chunk's divergences, [C], given the student's raw logits and their statistics."""
        assert self._loaded is not None
        raw_CK, bias_K = self._common(raw_CV, bias_V)
        if self.num_ids < raw_CV.shape[1]:
            statistics_C = self._kernels.softmax_statistics(
                raw_CK, bias_K, replace(settings, entropy=False, entropy_grad=False)
            )
        log_sum_C = statistics_C.log_sum()
        teacher_log_sum_C = self._kernels.softmax_statistics(*self._loaded).log_sum()
        inputs = (raw_CK, bias_K, settings, self._loaded, log_sum_C, teacher_log_sum_C)
        divergence_C, center_C = self._kernels.divergences(*inputs)
        self.statistics.append(PairStatistics(log_sum_C, teacher_log_sum_C, center_C))
        return divergence_C

    def logprobs(self, targets_C: Tensor) -> Tensor:
        """Return the teacher's log-probs of targets in the chunk that ran forward, [C]; -inf of ids that are not compared."""
        assert self._loaded is not None
        chosen_C = self._kernels.target_logits(
            self._loaded.raw_CK, self._loaded.bias_K, targets_C.clamp(max=self.num_ids - 1), self._loaded.settings
        )
        logprobs_C = chosen_C - self.statistics[-1].teacher_log_sum_C
        return logprobs_C.masked_fill(targets_C >= self.num_ids, -torch.inf)

    def gradient(
        self,
        raw_CS: Tensor,
        bias_S: Tensor | None,
        settings: ChunkSettings,
        statistics_C: PairStatistics,
        by_divergence_C: Tensor,
    ) -> Tensor | None:
        """Return the loss's gradient by the compared raw logits, [C, K], without a cap's; None if there are none."""
        if self._loaded is None:
            return None
        inputs = (*self._common(raw_CS, bias_S), settings, self._loaded, statistics_C, by_divergence_C)
        return self._kernels.divergence_gradient_(*inputs)

    def _common(self, raw_CS: Tensor, bias_S: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert self._loaded is not None
        width = self._loaded.raw_CK.shape[1]
        return raw_CS[:, :width], None if bias_S is None else bias_S[:width]


def divergence_of_logits(raw_CV: Tensor, targets_C: Tensor, chunk: slice, settings: ChunkSettings) -> Tensor:
    """Return differentiable divergences, [C], of a chunk's raw logits from the teacher's."""
    assert settings.teacher is not None
    raw_CK = raw_CV[:, : settings.teacher.num_common(raw_CV.shape[1])]
    return _DivergenceOfLogits.apply(raw_CK, targets_C, chunk, settings)


class _DivergenceOfLogits(torch.autograd.Function):
    """Divergences of raw logits; the teacher's logits live until backward and become the gradient."""

    @staticmethod
    def forward(ctx: Any, raw_CK: Tensor, targets_C: Tensor, chunk: slice, settings: ChunkSettings) -> Tensor:
        assert settings.teacher is not None
        kernels, num_ids = kernels_for(raw_CK), raw_CK.shape[1]
        ctx.settings = replace(settings, entropy=False, entropy_grad=False)
        ctx.teacher = TeacherChunks(settings.teacher, num_ids, settings, raw_CK.new_empty(raw_CK.numel()), kernels)
        ctx.teacher.load(chunk, slice(0, num_ids))
        ctx.save_for_backward(raw_CK)
        statistics_C = kernels.softmax_statistics(raw_CK, None, ctx.settings)
        divergence_C = ctx.teacher.forward(raw_CK, None, ctx.settings, statistics_C)
        if settings.teacher_logprobs_T is not None:
            settings.teacher_logprobs_T[chunk] = ctx.teacher.logprobs(targets_C)
        return divergence_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_C: Tensor) -> tuple[Tensor, None, None, None]:
        (raw_CK,), teacher, scale = ctx.saved_tensors, ctx.teacher, ctx.settings.scale
        ctx.teacher = None
        grad_CK = teacher.gradient(raw_CK, None, ctx.settings, teacher.statistics[-1], grad_C)
        if scale.softcap is not None:  # tanh' = 1 - tanh^2
            grad_CK *= 1.0 - (raw_CK * (scale.logit_scale / scale.softcap)).tanh_().square_()
        return grad_CK, None, None, None
