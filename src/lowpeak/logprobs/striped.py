"""A pass with vocabulary stripes outermost: bf16 on a CPU that has units for it, where it takes less of everything.

There products run on widened operands. Stripe by stripe the head is widened once a pass instead of once a chunk, and
a stripe of its gradient is finished (and rounded) before the next begins, so that no fp32 sum of the head's size stands
beside a bf16 gradient. The price is a second product for the logits: a loss's derivative needs all stripes' statistics.
At most `chunk_size` x V logits exist at a time, as in `visit.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowpeak.logprobs import rows as passes
from lowpeak.logprobs.definition import ChunkSettings
from lowpeak.logprobs.products import bf16_units, runs_in_bf16_units, wide_dtype
from lowpeak.logprobs.rows import RowDerivatives, RowStatistics, chosen_logits

_MOST_CHUNKS = 16  # in a block of tokens: stripes are at least a sixteenth of the vocabulary wide


def pays(hidden_TD: Tensor, settings: ChunkSettings) -> bool:
    """Whether stripes are the better order: not where one chunk holds all tokens."""
    return runs_in_bf16_units(hidden_TD.device, hidden_TD.dtype) and len(hidden_TD) > settings.chunk_size


class StripedGradients:
    """Gradients of hidden (a wide sum), weight (finished stripe by stripe; with `direct` in `.grad`) and bias."""

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, wanted: tuple[bool, bool, bool], direct: bool) -> None:
        wide = wide_dtype(hidden_TD.dtype)
        self.hidden_TD = torch.zeros_like(hidden_TD, dtype=wide) if wanted[0] else None
        self.bias_V = weight_VD.new_zeros(weight_VD.shape[0], dtype=wide) if wanted[2] else None
        self._parameter, self._direct, self._added = weight_VD, direct, direct and weight_VD.grad is not None
        self._wide: Tensor | None = None  # one stripe's fp32 sum, used again for each
        self.weight_VD: Tensor | None = None
        if wanted[1]:
            self.weight_VD = weight_VD.grad if self._added else torch.empty_like(weight_VD)

    def add(self, tokens: slice, ids: slice, grad_BS: Tensor, wide_SD: Tensor) -> None:
        """Take in a block's gradient by the logits of a stripe for hidden and bias."""
        if self.hidden_TD is not None:
            self.hidden_TD[tokens].addmm_(grad_BS, wide_SD)
        if self.bias_V is not None:
            self.bias_V[ids] += grad_BS.sum(0)

    def stripe(self, ids: slice, wide: torch.dtype, num_blocks: int) -> HeadStripe | None:
        """The head's gradient for these ids, to be summed over so many blocks; None where nothing wants it."""
        if self.weight_VD is None:
            return None
        into_SD = self.weight_VD[ids]
        if into_SD.dtype != wide and (num_blocks > 1 or self._added):
            if self._wide is None or len(self._wide) < len(into_SD):
                self._wide = torch.empty_like(into_SD, dtype=wide)
            return HeadStripe(into_SD, self._added, self._wide[: len(into_SD)])
        return HeadStripe(into_SD, self._added, None)

    def settle(self) -> None:
        """Leave a direct gradient in `.grad`."""
        if self._direct and self.weight_VD is not None:
            self._parameter.grad, self.weight_VD = self.weight_VD, None

    def scaled(self, factor: Tensor | None, dtypes: list[torch.dtype | None]) -> list[Tensor | None]:
        """The finished gradients in the inputs' dtypes, times `factor`: uses the sums up."""
        self.settle()
        grads = (self.hidden_TD, self.weight_VD, self.bias_V)
        return [
            None if grad is None else (grad if factor is None else grad.mul_(factor)).to(dtype)
            for grad, dtype in zip(grads, dtypes, strict=True)
        ]


class HeadStripe:
    """The head's gradient for the ids of one stripe: summed where it belongs, or wide beside it and then rounded.

    Where one product is all of it, bf16 operands give a bf16 result that was rounded once, as the wide sum would be.
    """

    def __init__(self, into_SD: Tensor, added: bool, wide_SD: Tensor | None) -> None:
        self._into_SD, self._added, self._wide_SD = into_SD, added, wide_SD
        self._begun = added and wide_SD is None

    def add(self, grad_BS: Tensor, hidden_BD: Tensor, wide_BD: Tensor) -> None:
        """Add `grad.T @ hidden` of a block; `wide` is its hidden states in the gradient's dtype."""
        sum_SD = self._into_SD if self._wide_SD is None else self._wide_SD
        if sum_SD.dtype == grad_BS.dtype:
            sum_SD.addmm_(grad_BS.T, wide_BD, beta=1 if self._begun else 0)
        else:
            torch.mm(grad_BS.to(hidden_BD.dtype).T, hidden_BD, out=sum_SD)
        self._begun = True

    def finish(self) -> None:
        """Round what was summed elsewhere, onto what stands."""
        if self._wide_SD is not None:
            self._into_SD.copy_(self._wide_SD.add_(self._into_SD) if self._added else self._wide_SD)


class StripedHead:
    """One pass: `values`, and then `gradients` from the same statistics."""

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, settings: ChunkSettings
    ) -> None:
        self._weight_VD, self._bias_V, self._targets_T, self._settings = weight_VD, bias_V, targets_T, settings
        self._dtype, self._wide_TD = hidden_TD.dtype, hidden_TD.to(wide_dtype(hidden_TD.dtype))
        self._hidden_TD = hidden_TD
        num_tokens, num_ids = len(hidden_TD), len(weight_VD)
        self._block = min(num_tokens, _MOST_CHUNKS * settings.chunk_size)
        self._width = max(1, settings.chunk_size * num_ids // self._block)
        self._logits = self._wide_TD.new_empty(self._block * self._width)
        self._stripe = self._wide_TD.new_empty(self._width, weight_VD.shape[1])

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies of all tokens, [T] and [T] or None."""
        chosen_T = self._wide_TD.new_zeros(len(self._wide_TD))
        parts: list[RowStatistics] = []
        for ids, wide_SD in self._stripes():
            found = []
            for tokens in self._blocks():
                logits_BS, bias_S = self._logits_of(tokens, wide_SD), self._bias_of(ids)
                targets_B = self._targets_in(tokens, ids)
                here_B = chosen_logits(logits_BS, bias_S, targets_B.clamp(min=0), self._settings)
                chosen_T[tokens] += here_B.masked_fill_(targets_B < 0, 0)
                found.append(passes.row_statistics(logits_BS, bias_S, self._settings))
            parts = [one.joined(two) for one, two in zip(parts, found, strict=True)] if parts else found
        self._parts = parts
        entropies = [x for x in (part.entropy() for part in parts) if x is not None]
        self._entropy_T = torch.cat(entropies) if entropies else None
        chosen = [chosen_T[tokens] for tokens in self._blocks()]
        logprobs_T = torch.cat([part.logprobs(x) for part, x in zip(parts, chosen, strict=True)])
        if self._settings.is_top1_T is not None:
            torch.cat([part.is_top1(x) for part, x in zip(parts, chosen, strict=True)], out=self._settings.is_top1_T)
        return logprobs_T, self._entropy_T

    def gradients(self, by_logprobs_T: Tensor, by_entropy_T: Tensor | None, sums: StripedGradients) -> None:
        """Form all gradients, given the loss's derivative by the log-probs and entropies."""
        for ids, wide_SD in self._stripes():
            stripe = sums.stripe(ids, self._wide_TD.dtype, len(self._parts))
            for tokens, statistics in zip(self._blocks(), self._parts, strict=True):
                grad_BS = self._logits_of(tokens, wide_SD)
                by_entropy_B, entropy_B = (None if x is None else x[tokens] for x in (by_entropy_T, self._entropy_T))
                derivatives = RowDerivatives(by_logprobs_T[tokens], by_entropy_B, entropy_B)
                inputs = (self._bias_of(ids), self._settings, self._targets_in(tokens, ids))
                passes.row_gradient_(grad_BS, *inputs, statistics, derivatives)
                with bf16_units(self._wide_TD.device, self._dtype):
                    sums.add(tokens, ids, grad_BS, wide_SD)
                    if stripe is not None:
                        stripe.add(grad_BS, self._hidden_TD[tokens], self._wide_TD[tokens])
            if stripe is not None:
                stripe.finish()

    def _stripes(self) -> Iterator[tuple[slice, Tensor]]:
        """Ids of a stripe and the head's rows for them, rounded to the compute dtype and widened."""
        for start in range(0, len(self._weight_VD), self._width):
            ids = slice(start, min(start + self._width, len(self._weight_VD)))
            narrow_SD = self._weight_VD[ids].to(self._dtype)
            yield ids, self._stripe[: len(narrow_SD)].copy_(narrow_SD)

    def _blocks(self) -> list[slice]:
        num_tokens = len(self._wide_TD)
        return [slice(i, min(i + self._block, num_tokens)) for i in range(0, num_tokens, self._block)]

    def _logits_of(self, tokens: slice, wide_SD: Tensor) -> Tensor:
        shape = (tokens.stop - tokens.start, len(wide_SD))
        logits_BS = self._logits[: shape[0] * shape[1]].view(shape)
        with bf16_units(self._wide_TD.device, self._dtype):
            return torch.mm(self._wide_TD[tokens], wide_SD.T, out=logits_BS)

    def _bias_of(self, ids: slice) -> Tensor | None:
        return None if self._bias_V is None else self._bias_V[ids]

    def _targets_in(self, tokens: slice, ids: slice) -> Tensor:
        """Columns of the stripe, -1 for a target that is not in it."""
        columns_B = self._targets_T[tokens] - ids.start
        return columns_B.masked_fill((columns_B < 0) | (columns_B >= ids.stop - ids.start), -1)
