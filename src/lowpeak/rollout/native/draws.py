"""The hashed uniforms of a batch, some positions ahead: their making costs a hundred small operations each time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.waves import Wave
from lowpeak.rollout.sampling import uniforms

_AHEAD = 64  # positions made together


class Draws:
    """The uniforms of rows at the positions of their completions, from `starts` (one a row, 0 where it is missing)."""

    def __init__(
        self,
        wave: Wave,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        device: torch.device,
        starts: Sequence[int] | None = None,
    ) -> None:
        self._sampling = sampling
        self._serials_N = torch.tensor([prompts[row.prompt].serial for row in wave]).to(device)
        self._completions_N = torch.tensor([row.completion for row in wave]).to(device)
        self._starts_N1 = torch.tensor(starts or [0] * len(wave))[:, None].to(device)
        self._uniforms_NK = torch.empty(len(wave), 0, device=device)

    def at(self, position: int) -> Tensor | None:
        """The uniforms [N] of `position` after the rows' starts, asked for in order from 0; None when greedy."""
        if self._sampling.temperature == 0:
            return None
        if position % _AHEAD == 0:
            stop = min(position + _AHEAD, self._sampling.max_new_tokens)
            positions_K = torch.arange(position, stop, device=self._serials_N.device)
            self._uniforms_NK = uniforms(
                self._sampling, self._serials_N, self._completions_N, self._starts_N1 + positions_K
            )
        return self._uniforms_NK[:, position % _AHEAD]
