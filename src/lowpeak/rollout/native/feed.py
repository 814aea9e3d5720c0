"""What the model is fed for each row: its newest token, its position, and a mask over what the others have longer.

Shapes: N rows, L columns of the cache with the newest token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowpeak.attention.support import NAME
from lowpeak.config.rollout import Sampling
from lowpeak.rollout.native.budget import parameter_dtype, text_config
from lowpeak.rollout.native.cache import SlotCache
from lowpeak.rollout.native.prefill import left_padded
from lowpeak.rollout.native.stop import Progress

# Attention that adds a mask to its scores takes one that is made already, once for all layers; flash kernels do not.
_ADD_MASKS = ("sdpa", "eager", NAME)


class Feed:
    """The newest token of each row of a batch, on the device; a token's column in the cache is its position."""

    def __init__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling, progress: Progress
    ) -> None:
        self._model = model
        self._size = sampling.num_generations
        self._progress = progress
        self._device = progress.device
        self._lengths_P = torch.tensor([len(ids) for ids in prompts], dtype=torch.int64).to(self._device)
        known = sampling.repetition_penalty != 1 and len(prompts) > 0
        self._prompts_PL = left_padded(prompts, self._device) if known else None
        self._mask_dtype = _mask_dtype(model)
        self.rows_N: Tensor
        self.written_N: Tensor
        self._columns_N: Tensor
        self._tokens_N: Tensor

    def restart(self, rows: Sequence[int]) -> None:
        """Go on with these rows, numbers of the call's, from what they have written."""
        self.rows_N = torch.tensor(rows).to(self._device, non_blocking=True)
        self.written_N = self._progress.written(self.rows_N)
        self._tokens_N = self._progress.newest(self.rows_N, self.written_N)
        self._columns_N = self._lengths_P[self.rows_N // self._size] + self.written_N - 1

    def advance(self, tokens_N: Tensor) -> None:
        """Each row has written one token more."""
        self._tokens_N = tokens_N
        self.written_N, self._columns_N = self.written_N + 1, self._columns_N + 1

    def forward(self, cache: SlotCache, num_columns: int) -> Tensor:
        """The logits [N, V] of the rows' newest tokens, which go into the cache."""
        cache.begin(self._columns_N, num_columns)
        output = self._model(
            input_ids=self._tokens_N[:, None],
            attention_mask=self._mask(num_columns),
            position_ids=self._columns_N[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def history(self, num_columns: int) -> Tensor | None:
        """The tokens [N, L] that a repetition penalty knows, padded with the prompt's first; None where there is none."""
        if self._prompts_PL is None:
            return None
        prompts_NL = self._prompts_PL[self.rows_N // self._size]
        written_NL = self._progress.tokens(self.rows_N, num_columns)
        columns_L = torch.arange(written_NL.shape[1], device=self._device)
        written_NL = torch.where(columns_L < self.written_N[:, None], written_NL, prompts_NL[:, :1])
        return torch.cat([prompts_NL, written_NL], dim=-1)

    def _mask(self, num_columns: int) -> Tensor:
        """What each row sees of the columns: scores to add [N, 1, 1, L] where attention adds them, else 0 and 1 [N, L]."""
        seen_NL = torch.arange(num_columns, device=self._device) <= self._columns_N[:, None]
        if self._mask_dtype is None:
            return seen_NL.long()
        zeros = torch.zeros((), dtype=self._mask_dtype, device=self._device)
        return torch.where(seen_NL, zeros, torch.finfo(self._mask_dtype).min)[:, None, None]


def _mask_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of a mask that is added to the scores, None where transformers is to make the mask."""
    config = text_config(model)
    prepared = getattr(config, "_attn_implementation", None) in _ADD_MASKS and not getattr(config, "alibi", False)
    return parameter_dtype(model) if prepared else None
