"""Passes over a chunk's raw logits as torch operations: softmax statistics, and the gradient in place.

With x a raw logit and the final logit z = softcap * tanh((x + bias) * scale / softcap) / temperature (or without a cap,
z = (x + bias) * scale / temperature):

    max = max_v z_v      sum = sum_v e_v      dot = sum_v e_v (z_v - max)      with e_v = exp(z_v - max)

Blocks of R tokens are so small that their intermediates stay in the processor's cache. There is one buffer of [C, V],
read once for the statistics, and read and written once for the gradient. `triton_kernels.py` does the same on CUDA.

With a teacher there is a second buffer of [C, K]: `divergences` reads both, and `divergence_gradient_` overwrites the
teacher's. With log p and log q the log-softmax of both, d = log q - log p and m = (1 - beta) p + beta q:

    beta 0   F = sum q d                               dF / dz = p - q
    beta 1   R = -sum p d                              dR / dz = -p (d + R)
    else     J = beta sum q (d - l) - (1 - beta) sum p l    dJ / dz = -(1 - beta) p (l + KL(p | m))

l = log m - log p = log1p(beta expm1(d)) stays exact where both models are nearly equal; logaddexp would not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowpeak.device_kind import device_kind
from lowpeak.logprobs.reference import ChunkSettings

_NUMBERS_IN_CACHE = 1 << 19  # of all scratch buffers, per thread: 2 MB in fp32
_NUMBERS_ON_DEVICE = 1 << 25  # elsewhere kernel launches dominate
_LARGEST = 80.0  # of log q - log p: expm1 of more overflows, and p is then 0 beside q


class SoftmaxStatistics(NamedTuple):
    """Sums over the vocabulary for each of C tokens, relative to the maximum; `dot_C` if the entropy is wanted."""

    max_C: Tensor
    sum_C: Tensor
    dot_C: Tensor | None

    def logprobs(self, chosen_C: Tensor) -> Tensor:
        """Return the log-probs of the ids whose final logits are `chosen`."""
        return chosen_C - self.max_C - self.sum_C.log()

    def is_top1(self, chosen_C: Tensor) -> Tensor:
        """Return whether no id has a greater final logit than `chosen`: bool [C]."""
        return chosen_C >= self.max_C

    def log_sum(self) -> Tensor:
        """Return `log(sum(exp(z)))` of each token."""
        return self.max_C + self.sum_C.log()

    def entropy(self) -> Tensor | None:
        """Return `-sum(p log p)` of each token."""
        return None if self.dot_C is None else self.sum_C.log() - self.dot_C / self.sum_C


class TeacherLogits(NamedTuple):
    """A teacher's raw logits of the K compared ids of a chunk, and how they become final ones."""

    raw_CK: Tensor
    bias_K: Tensor | None
    settings: ChunkSettings


class PairStatistics(NamedTuple):
    """Log-sums of student's and teacher's exp(z) over the K ids, and the term that the divergence's gradient subtracts."""

    log_sum_C: Tensor
    teacher_log_sum_C: Tensor
    center_C: Tensor  # R, KL(p | m), or 0 for beta 0


class LossDerivatives(NamedTuple):
    """The loss's derivatives by each token's log-prob and, if wanted, by its entropy and its divergence."""

    by_logprobs_C: Tensor
    by_entropy_C: Tensor | None = None
    by_divergence_C: Tensor | None = None

    def coefficients(self, statistics: SoftmaxStatistics, gain: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (a, b, k), each [C], of the gradient by x_v without a cap: `a [v = t] + e_v (b + k (z_v - max))`.

        k is None without an entropy.
        """
        a_C = self.by_logprobs_C * gain
        b_C = -a_C / statistics.sum_C
        if self.by_entropy_C is None:
            return a_C, b_C, None
        assert statistics.dot_C is not None
        k_C = -gain * self.by_entropy_C / statistics.sum_C
        return a_C, b_C - k_C * statistics.dot_C / statistics.sum_C, k_C


def target_logits(raw_CV: Tensor, bias_V: Tensor | None, targets_C: Tensor, settings: ChunkSettings) -> Tensor:
    """Return the final logits of the targets: [C]."""
    chosen_C = raw_CV.gather(-1, targets_C[:, None])[:, 0]
    return _finish_(chosen_C, None if bias_V is None else bias_V[targets_C], settings)


def softmax_statistics(raw_CV: Tensor, bias_V: Tensor | None, settings: ChunkSettings) -> SoftmaxStatistics:
    """Return each token's sums over the vocabulary; reads `raw` once and leaves it unchanged."""
    max_C = raw_CV.new_empty(len(raw_CV))
    sum_C, dot_C = torch.empty_like(max_C), torch.empty_like(max_C) if settings.entropy else None
    plain = bias_V is None and settings.gain == 1.0 and settings.scale.softcap is None
    for block, (scratch_RV, *second) in _blocks(raw_CV, 2 if settings.entropy else 1):
        raw_RV = raw_CV[block]
        logits_RV = raw_RV if plain else _finish_(scratch_RV.copy_(raw_RV), bias_V, settings)
        max_R1 = logits_RV.amax(-1, keepdim=True)
        max_C[block] = max_R1[:, 0]
        shifted_RV = torch.sub(logits_RV, max_R1, out=scratch_RV)
        if dot_C is None:
            sum_C[block] = shifted_RV.exp_().sum(-1)
        else:
            exp_RV = torch.exp(shifted_RV, out=second[0])
            sum_C[block] = exp_RV.sum(-1)
            # Three times as fast as a batched dot product.
            dot_C[block] = shifted_RV.mul_(exp_RV).sum(-1)
    return SoftmaxStatistics(max_C, sum_C, dot_C)


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

    `extra` is added to the gradient by the first K final logits. The logits may be a range of the vocabulary's: targets and
    bias are then relative to its start, and a target outside it adds nothing.
    """
    softcap = settings.scale.softcap
    a_C, b_C, k_C = derivatives.coefficients(statistics, settings.gain)
    is_outside_C = (targets_C < 0) | (targets_C >= raw_CV.shape[1])
    a_C, targets_C = a_C.masked_fill(is_outside_C, 0), targets_C.masked_fill(is_outside_C, 0)
    for block, scratch in _blocks(raw_CV, (softcap is not None) + (k_C is not None)):
        grad_RV = _finish_(raw_CV[block], bias_V, settings)
        if softcap is not None:  # tanh' = 1 - tanh^2
            slope_RV = torch.mul(grad_RV, settings.temperature / softcap, out=scratch[0])
            slope_RV.square_().neg_().add_(1.0)
        grad_RV -= statistics.max_C[block, None]
        if k_C is None:
            grad_RV.exp_().mul_(b_C[block, None])
        else:
            exp_RV = torch.exp(grad_RV, out=scratch[-1])
            grad_RV.mul_(k_C[block, None]).add_(b_C[block, None]).mul_(exp_RV)
        grad_RV.scatter_add_(-1, targets_C[block, None], a_C[block, None])
        if extra_CK is not None:
            grad_RV[:, : extra_CK.shape[1]] += extra_CK[block]
        if softcap is not None:
            grad_RV *= slope_RV
        if narrow_CV is not None:
            narrow_CV[block] = grad_RV
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
    beta, divergence_C, center_C = settings.beta, torch.empty_like(log_sum_C), torch.zeros_like(log_sum_C)
    for block, (log_p, log_q, *more) in _blocks(raw_CK, 2 if beta in (0, 1) else 4):
        _finish_(log_p.copy_(raw_CK[block]), bias_K, settings).sub_(log_sum_C[block, None])
        _finish_(log_q.copy_(teacher.raw_CK[block]), *teacher[1:]).sub_(teacher_log_sum_C[block, None])
        if beta == 0:
            d = torch.sub(log_q, log_p, out=log_p)
            divergence_C[block] = log_q.exp_().mul_(d).sum(-1)
        elif beta == 1:
            minus_d = torch.sub(log_p, log_q, out=log_q)
            divergence_C[block] = center_C[block] = log_p.exp_().mul_(minus_d).sum(-1)
        else:
            d = torch.sub(log_q, log_p, out=more[0])
            mixture = _log_mixture_(more[1].copy_(d.clamp_(max=_LARGEST)), beta)
            center_C[block] = -log_p.exp_().mul_(mixture).sum(-1)
            of_teacher = log_q.exp_().mul_(d.sub_(mixture)).sum(-1)
            divergence_C[block] = beta * of_teacher + (1 - beta) * center_C[block]
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
    beta, gain_C = settings.beta, by_divergence_C * settings.gain
    for block, (log_p,) in _blocks(raw_CK, 1):
        _finish_(log_p.copy_(raw_CK[block]), bias_K, settings).sub_(statistics.log_sum_C[block, None])
        grad_RK = _finish_(teacher.raw_CK[block], *teacher[1:]).sub_(statistics.teacher_log_sum_C[block, None])
        if beta == 0:
            torch.sub(log_p.exp_(), grad_RK.exp_(), out=grad_RK).mul_(gain_C[block, None])
            continue
        grad_RK.sub_(log_p)
        if beta < 1:
            _log_mixture_(grad_RK.clamp_(max=_LARGEST), beta)
        factor_C = -gain_C if beta == 1 else (beta - 1) * gain_C
        grad_RK.add_(statistics.center_C[block, None]).mul_(factor_C[block, None]).mul_(log_p.exp_())
    return teacher.raw_CK


def _log_mixture_(d: Tensor, beta: float) -> Tensor:
    """Overwrite d = log q - log p with log m - log p."""
    return d.expm1_().mul_(beta).log1p_()


def _finish_(raw_RV: Tensor, bias_V: Tensor | None, settings: ChunkSettings) -> Tensor:
    """Overwrite raw logits x with final logits z."""
    scale = settings.scale
    if bias_V is not None:
        raw_RV += bias_V
    if scale.softcap is not None:
        raw_RV.mul_(scale.logit_scale / scale.softcap).tanh_()
        return raw_RV.mul_(scale.softcap / settings.temperature)
    return raw_RV if settings.gain == 1.0 else raw_RV.mul_(settings.gain)


def _blocks(matrix_CV: Tensor, num_scratch: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield blocks of tokens that fit into the cache, each with scratch buffers of its shape.

    For fake tensors there is one block: each takes the same memory.
    """
    num_tokens, width = matrix_CV.shape
    room = _NUMBERS_IN_CACHE * torch.get_num_threads() if device_kind(matrix_CV.device) == "cpu" else _NUMBERS_ON_DEVICE
    # Many threads have much cache: scratch stays below a quarter of the logits.
    step = max(1, min(room // max(1, width), num_tokens // 4) // max(2, num_scratch))
    scratch = [matrix_CV.new_empty(step, width) for _ in range(num_scratch)]
    for start in range(0, step if isinstance(matrix_CV, FakeTensor) else num_tokens, step):
        block = slice(start, min(start + step, num_tokens))
        yield block, [each[: block.stop - start] for each in scratch]
