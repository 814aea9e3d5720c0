"""One visit to the head: a chunk's logits, its log-probs and entropies, and from the same logits its gradients.

With z = scale(hidden @ weight.T + bias) / temperature, p = softmax(z), H = -sum(p log p) and targets t:

    d logprob / dz_v = [v = t] - p_v          d H / dz_v = -p_v (log p_v + H)

There is one [C, V] buffer, made once and reused (two where the tensor cores want the gradient in bf16).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowpeak.logprobs import rows as torch_rows
from lowpeak.logprobs.agreement import cuda_passes
from lowpeak.logprobs.definition import ChunkSettings
from lowpeak.logprobs.products import HeadGradients, has_wide_product, project, wide_dtype
from lowpeak.logprobs.rows import RowDerivatives


class HeadVisit:
    """Visits chunk after chunk: `values`, and then `gradients` of that same chunk, which uses its logits up."""

    def __init__(
        self, weight_VD: Tensor, bias_V: Tensor | None, settings: ChunkSettings, hidden_TD: Tensor, for_gradients: bool
    ) -> None:
        # For tensor cores the head is cast once per pass; elsewhere a stripe at a time, in the products.
        casts = has_wide_product(hidden_TD)
        self._weight_VD = weight_VD.to(hidden_TD.dtype) if casts else weight_VD
        self._bias_V, self._settings = bias_V, settings
        shape = (min(settings.chunk_size, len(hidden_TD)), weight_VD.shape[0])
        self._logits = hidden_TD.new_empty(shape, dtype=wide_dtype(hidden_TD.dtype))
        self._narrow = hidden_TD.new_empty(shape) if casts and for_gradients else None
        self._passes = passes_for(self._logits)

    def values(self, hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of a chunk, [C] and [C] or None."""
        self._hidden_CD, self._targets_C = hidden_CD, targets_C
        logits_CV = self._logits[: len(hidden_CD)]
        project(logits_CV, hidden_CD, self._weight_VD)
        self._chosen_C = self._passes.chosen_logits(logits_CV, self._bias_V, targets_C, self._settings)
        self._statistics = self._passes.row_statistics(logits_CV, self._bias_V, self._settings)
        self._entropy_C = self._statistics.entropy()
        return self._statistics.logprobs(self._chosen_C), self._entropy_C

    def is_top1(self) -> Tensor:
        """Whether the visited chunk's targets are their rows' greatest logits: bool [C]."""
        return self._statistics.is_top1(self._chosen_C)

    def gradients(self, by_logprobs_C: Tensor, by_entropy_C: Tensor | None, sums: HeadGradients, chunk: slice) -> None:
        """Add the visited chunk's part to `sums`, given the loss's derivative by its log-probs and entropies."""
        logits_CV = self._logits[: len(self._hidden_CD)]
        derivatives = RowDerivatives(by_logprobs_C, by_entropy_C, self._entropy_C)
        narrow_CV = None if self._narrow is None else self._narrow[: len(logits_CV)]
        inputs = (self._bias_V, self._settings, self._targets_C, self._statistics, derivatives)
        grad_CV = self._passes.row_gradient_(logits_CV, *inputs, narrow_CV)
        sums.add(chunk, grad_CV, narrow_CV, self._hidden_CD, self._weight_VD)


def passes_for(logits_CV: Tensor) -> Any:
    """The module of passes over the logits: Triton's on CUDA where they agree with torch's, else torch's."""
    fake = isinstance(logits_CV, FakeTensor)
    return (
        cuda_passes(logits_CV.device)
        if logits_CV.is_cuda and logits_CV.dtype == torch.float32 and not fake
        else torch_rows
    )
