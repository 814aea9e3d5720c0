"""Two passes over a chunk's raw logits as torch operations: softmax statistics, and the gradient in place.

With x a raw logit and the final logit z = softcap * tanh((x + bias) * scale / softcap) / temperature (or without a cap,
z = (x + bias) * scale / temperature):

    max = max_v z_v      sum = sum_v e_v      dot = sum_v e_v (z_v - max)      with e_v = exp(z_v - max)

Blocks of R tokens are so small that their intermediates stay in the processor's cache. There is one buffer of [C, V],
read once for the statistics, and read and written once for the gradient. `triton_kernels.py` does the same on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowpeak.device_kind import device_kind
from lowpeak.logprobs.reference import ChunkSettings

_NUMBERS_IN_CACHE = 1 << 18  # of each scratch buffer, per thread: 1 MB in fp32
_NUMBERS_ON_DEVICE = 1 << 24  # elsewhere kernel launches dominate


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

    def entropy(self) -> Tensor | None:
        """Return `-sum(p log p)` of each token."""
        return None if self.dot_C is None else self.sum_C.log() - self.dot_C / self.sum_C


class LossDerivatives(NamedTuple):
    """The loss's derivatives by each token's log-prob and, if wanted, by its entropy."""

    by_logprobs_C: Tensor
    by_entropy_C: Tensor | None = None

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
    for block, scratch_RV, second_RV in _blocks(raw_CV, 2 if settings.entropy else 1):
        raw_RV = raw_CV[block]
        logits_RV = raw_RV if plain else _finish_(scratch_RV.copy_(raw_RV), bias_V, settings)
        max_R1 = logits_RV.amax(-1, keepdim=True)
        max_C[block] = max_R1[:, 0]
        shifted_RV = torch.sub(logits_RV, max_R1, out=scratch_RV)
        if dot_C is None:
            sum_C[block] = shifted_RV.exp_().sum(-1)
        else:
            exp_RV = torch.exp(shifted_RV, out=second_RV)
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
) -> Tensor:
    """Overwrite raw logits with the loss's gradient by them and return it; copy it into `narrow` if given.

    The logits may be a range of the vocabulary's: targets and bias are then relative to its start, and a target outside
    it adds nothing.
    """
    softcap = settings.scale.softcap
    a_C, b_C, k_C = derivatives.coefficients(statistics, settings.gain)
    is_outside_C = (targets_C < 0) | (targets_C >= raw_CV.shape[1])
    a_C, targets_C = a_C.masked_fill(is_outside_C, 0), targets_C.masked_fill(is_outside_C, 0)
    num_scratch = (softcap is not None) + (k_C is not None)
    for block, slope_RV, exp_RV in _blocks(raw_CV, num_scratch):
        grad_RV = _finish_(raw_CV[block], bias_V, settings)
        if softcap is not None:  # tanh' = 1 - tanh^2
            torch.mul(grad_RV, settings.temperature / softcap, out=slope_RV)
            slope_RV.square_().neg_().add_(1.0)
        grad_RV -= statistics.max_C[block, None]
        if k_C is None:
            grad_RV.exp_().mul_(b_C[block, None])
        else:
            torch.exp(grad_RV, out=exp_RV)
            grad_RV.mul_(k_C[block, None]).add_(b_C[block, None]).mul_(exp_RV)
        grad_RV.scatter_add_(-1, targets_C[block, None], a_C[block, None])
        if softcap is not None:
            grad_RV *= slope_RV
        if narrow_CV is not None:
            narrow_CV[block] = grad_RV
    return raw_CV


def _finish_(raw_RV: Tensor, bias_V: Tensor | None, settings: ChunkSettings) -> Tensor:
    """Overwrite raw logits x with final logits z."""
    scale = settings.scale
    if bias_V is not None:
        raw_RV += bias_V
    if scale.softcap is not None:
        raw_RV.mul_(scale.logit_scale / scale.softcap).tanh_()
        return raw_RV.mul_(scale.softcap / settings.temperature)
    return raw_RV if settings.gain == 1.0 else raw_RV.mul_(settings.gain)


def _blocks(matrix_CV: Tensor, num_scratch: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of tokens that fit into the cache, each with two scratch buffers of its shape.

    With `num_scratch` 1 both are the same buffer, with 0 both are empty. For fake tensors there is one block: each takes
    the same memory.
    """
    num_tokens, width = matrix_CV.shape
    room = _NUMBERS_IN_CACHE * torch.get_num_threads() if device_kind(matrix_CV.device) == "cpu" else _NUMBERS_ON_DEVICE
    # Many threads have much cache: scratch stays below an eighth of the logits.
    step = max(1, min(num_tokens, room // max(1, width), num_tokens // 8))
    scratch = [matrix_CV.new_empty(step if number < num_scratch else 0, width) for number in range(2)]
    for start in range(0, step if isinstance(matrix_CV, FakeTensor) else num_tokens, step):
        block = slice(start, min(start + step, num_tokens))
        count = block.stop - start
        yield block, scratch[0][:count], scratch[-1 if num_scratch == 2 else 0][:count]
