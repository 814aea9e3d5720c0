"""One visit to the head: a chunk's logits, its log-probs and entropies, and from the same logits its gradients.

With z = scale(hidden @ weight.T + bias) / temperature, p = softmax(z), H = -sum(p log p) and targets t:

    d logprob / dz_v = [v = t] - p_v          d H / dz_v = -p_v (log p_v + H)

No more than three [C, V] buffers exist, made once and reused: one always, one for an entropy, one for a soft-cap's
derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.logprobs.definition import ChunkSettings
from lowpeak.logprobs.products import HeadGradients, project, wide_dtype


class HeadVisit:
    """Visits chunk after chunk: `values`, and then `gradients` of that same chunk, which uses its buffers up."""

    def __init__(
        self, weight_VD: Tensor, bias_V: Tensor | None, settings: ChunkSettings, num_rows: int, for_gradients: bool
    ) -> None:
        self._weight_VD, self._bias_V, self._settings = weight_VD, bias_V, settings
        shape, dtype = (num_rows, weight_VD.shape[0]), wide_dtype(weight_VD.dtype)
        capped = settings.scale.softcap is not None
        self._exp = weight_VD.new_empty(shape, dtype=dtype)
        self._shifted = weight_VD.new_empty(shape, dtype=dtype) if settings.entropy else None
        self._tanh = weight_VD.new_empty(shape, dtype=dtype) if capped and for_gradients else None

    def values(self, hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of a chunk, [C] and [C] or None."""
        self._hidden_CD, self._targets_C1 = hidden_CD, targets_C[:, None]
        shifted_CV = self._tempered_logits(hidden_CD)
        shifted_CV -= shifted_CV.amax(-1, keepdim=True)
        chosen_C = shifted_CV.gather(-1, self._targets_C1)[:, 0]
        if self._shifted is not None:
            self._shifted[: len(hidden_CD)].copy_(shifted_CV)
        self._exp_CV = shifted_CV.exp_()
        self._sum_C = self._exp_CV.sum(-1)
        self._log_sum_C = self._sum_C.log()
        self._entropy_C = self._entropy()
        return chosen_C - self._log_sum_C, self._entropy_C

    def gradients(
        self, grad_logprobs_C: Tensor, grad_entropy_C: Tensor | None, sums: HeadGradients, rows: slice
    ) -> None:
        """Add the visited chunk's part to `sums`, given the loss's derivative by its log-probs and entropies."""
        # The temperature and the scale are one factor per row, so they cost no pass over [C, V].
        gain = self._settings.scale.logit_scale / self._settings.temperature
        grad_C1 = (grad_logprobs_C * gain)[:, None]
        sum_C1, grad_CV = self._sum_C[:, None], self._exp_CV
        if grad_entropy_C is None:
            grad_CV *= -grad_C1 / sum_C1
        else:
            assert self._shifted is not None
            assert self._entropy_C is not None
            factor_CV = self._shifted[: len(grad_CV)]
            factor_CV += (self._entropy_C - self._log_sum_C)[:, None]
            factor_CV *= -gain * grad_entropy_C[:, None] / sum_C1
            factor_CV -= grad_C1 / sum_C1
            grad_CV *= factor_CV
        grad_CV.scatter_add_(-1, self._targets_C1, grad_C1)
        if self._tanh is not None:
            grad_CV *= self._tanh[: len(grad_CV)].square_().neg_().add_(1.0)
        sums.add(rows, grad_CV, self._hidden_CD, self._weight_VD)

    def _tempered_logits(self, hidden_CD: Tensor) -> Tensor:
        scale, temperature = self._settings.scale, self._settings.temperature
        logits_CV = self._exp[: len(hidden_CD)]
        project(logits_CV, hidden_CD, self._weight_VD)
        if self._bias_V is not None:
            logits_CV += self._bias_V
        if scale.softcap is not None:
            logits_CV.mul_(scale.logit_scale / scale.softcap).tanh_()
            if self._tanh is not None:
                self._tanh[: len(hidden_CD)].copy_(logits_CV)
            return logits_CV.mul_(scale.softcap / temperature)
        gain = scale.logit_scale / temperature
        return logits_CV if gain == 1.0 else logits_CV.mul_(gain)

    def _entropy(self) -> Tensor | None:
        if self._shifted is None:
            return None
        shifted_CV = self._shifted[: len(self._exp_CV)]
        # A batched dot product, so that no [C, V] product of the two exists.
        dot_C = torch.bmm(self._exp_CV[:, None, :], shifted_CV[:, :, None])[:, 0, 0]
        return self._log_sum_C - dot_C / self._sum_C
