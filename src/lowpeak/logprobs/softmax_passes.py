"""The two passes over a chunk's raw logits, as torch operations: what a row sums to, and its gradient in place.

With x a raw logit and z = softcap * tanh((x + bias) * scale / softcap) / temperature, where the settings say so:

    max = max_v z_v      sum = sum_v e_v      dot = sum_v e_v (z_v - max)      with e_v = exp(z_v - max)

Rows are taken so few at a time that what is made of them stays in the processor's cache: of [C, V] there is one buffer,
read once for the statistics and read and written once for the gradient. `triton_kernels.py` does the same on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowpeak.logprobs.reference import ChunkSettings

_NUMBERS_IN_CACHE = 1 << 18  # of each scratch, for a thread: 1 MB in fp32
_NUMBERS_ON_DEVICE = 1 << 24  # elsewhere a kernel's launch is what costs


@dataclass(frozen=True)
class RowStatistics:
    """Sums over each of C rows, relative to its maximum; `dot_C` where an entropy is wanted."""

    max_C: Tensor
    sum_C: Tensor
    dot_C: Tensor | None

    def logprobs(self, chosen_C: Tensor) -> Tensor:
        """Log-probs of the ids whose finished logits are `chosen`."""
        return chosen_C - self.max_C - self.sum_C.log()

    def is_top1(self, chosen_C: Tensor) -> Tensor:
        """Whether no id of the row has a greater finished logit than `chosen`: bool [C]."""
        return chosen_C >= self.max_C

    def entropy(self) -> Tensor | None:
        """`-sum(p log p)` of each row."""
        return None if self.dot_C is None else self.sum_C.log() - self.dot_C / self.sum_C


@dataclass(frozen=True)
class RowDerivatives:
    """The loss's derivatives by each row's log-prob and, where one is wanted, by its entropy."""

    by_logprobs_C: Tensor
    by_entropy_C: Tensor | None = None
    entropy_C: Tensor | None = None

    def coefficients(self, rows: RowStatistics, gain: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """(a, b, k), each [C]: the gradient by x_v is `a [v = t] + e_v (b + k (z_v - max))`, k None without entropy."""
        a_C = self.by_logprobs_C * gain
        b_C = -a_C / rows.sum_C
        if self.by_entropy_C is None:
            return a_C, b_C, None
        assert self.entropy_C is not None
        k_C = -gain * self.by_entropy_C / rows.sum_C
        return a_C, b_C + k_C * (self.entropy_C - rows.sum_C.log()), k_C


def chosen_logits(raw_CV: Tensor, bias_V: Tensor | None, targets_C: Tensor, settings: ChunkSettings) -> Tensor:
    """Finished logits of the targets, [C]."""
    chosen_C = raw_CV.gather(-1, targets_C[:, None])[:, 0]
    return _finish_(chosen_C, None if bias_V is None else bias_V[targets_C], settings)


def row_statistics(raw_CV: Tensor, bias_V: Tensor | None, settings: ChunkSettings) -> RowStatistics:
    """One read of `raw`: it is left as it was."""
    max_C = raw_CV.new_empty(len(raw_CV))
    sum_C, dot_C = torch.empty_like(max_C), torch.empty_like(max_C) if settings.entropy else None
    plain = bias_V is None and settings.gain == 1.0 and settings.scale.softcap is None
    for rows, scratch_RV, second_RV in _blocks(raw_CV, 2 if settings.entropy else 1):
        raw_RV = raw_CV[rows]
        logits_RV = raw_RV if plain else _finish_(scratch_RV.copy_(raw_RV), bias_V, settings)
        max_R1 = logits_RV.amax(-1, keepdim=True)
        max_C[rows] = max_R1[:, 0]
        shifted_RV = torch.sub(logits_RV, max_R1, out=scratch_RV)
        if dot_C is None:
            sum_C[rows] = shifted_RV.exp_().sum(-1)
        else:
            exp_RV = torch.exp(shifted_RV, out=second_RV)
            sum_C[rows] = exp_RV.sum(-1)
            dot_C[rows] = shifted_RV.mul_(exp_RV).sum(-1)  # three times as fast as a batched dot product
    return RowStatistics(max_C, sum_C, dot_C)


def row_gradient_(
    raw_CV: Tensor,
    bias_V: Tensor | None,
    settings: ChunkSettings,
    targets_C: Tensor,
    statistics: RowStatistics,
    derivatives: RowDerivatives,
    narrow_CV: Tensor | None = None,
) -> Tensor:
    """Turn raw logits into the loss's derivative by them, in place, and into `narrow` where it is given; returns them."""
    softcap = settings.scale.softcap
    a_C, b_C, k_C = derivatives.coefficients(statistics, settings.gain)
    num_scratch = (softcap is not None) + (k_C is not None)
    for rows, slope_RV, exp_RV in _blocks(raw_CV, num_scratch):
        grad_RV = _finish_(raw_CV[rows], bias_V, settings)
        if softcap is not None:  # tanh' = 1 - tanh^2
            torch.mul(grad_RV, settings.temperature / softcap, out=slope_RV)
            slope_RV.square_().neg_().add_(1.0)
        grad_RV -= statistics.max_C[rows, None]
        if k_C is None:
            grad_RV.exp_().mul_(b_C[rows, None])
        else:
            torch.exp(grad_RV, out=exp_RV)
            grad_RV.mul_(k_C[rows, None]).add_(b_C[rows, None]).mul_(exp_RV)
        grad_RV.scatter_add_(-1, targets_C[rows, None], a_C[rows, None])
        if softcap is not None:
            grad_RV *= slope_RV
        if narrow_CV is not None:
            narrow_CV[rows] = grad_RV
    return raw_CV


def _finish_(raw_RV: Tensor, bias_V: Tensor | None, settings: ChunkSettings) -> Tensor:
    """z of x, in place."""
    scale = settings.scale
    if bias_V is not None:
        raw_RV += bias_V
    if scale.softcap is not None:
        raw_RV.mul_(scale.logit_scale / scale.softcap).tanh_()
        return raw_RV.mul_(scale.softcap / settings.temperature)
    return raw_RV if settings.gain == 1.0 else raw_RV.mul_(settings.gain)


def _blocks(matrix_CV: Tensor, num_scratch: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows that fit into the cache, with two scratches of their shape: one and the same of `num_scratch` 1, empty of 0.

    Of fake tensors one block stands for all: it takes what each does.
    """
    num_rows, width = matrix_CV.shape
    room = _NUMBERS_IN_CACHE * torch.get_num_threads() if matrix_CV.device.type == "cpu" else _NUMBERS_ON_DEVICE
    # Many threads have much cache: an eighth of the logits bounds the scratch beside them.
    step = max(1, min(num_rows, room // max(1, width), num_rows // 8))
    scratch = [matrix_CV.new_empty(step if number < num_scratch else 0, width) for number in range(2)]
    for start in range(0, step if isinstance(matrix_CV, FakeTensor) else num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        count = rows.stop - start
        yield rows, scratch[0][:count], scratch[-1 if num_scratch == 2 else 0][:count]
