"""The hashed uniforms of a wave, some positions ahead: their making costs a hundred small operations each time."""

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
    """The uniforms of rows at the positions of their completions."""

    def __init__(self, wave: Wave, prompts: Sequence[Prompt], sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._serials_N = torch.tensor([prompts[row.prompt].serial for row in wave]).to(device)
        self._completions_N = torch.tensor([row.completion for row in wave]).to(device)
        self._uniforms_NK = torch.empty(len(wave), 0, device=device)

    def at(self, position: int) -> Tensor | None:
        """The uniforms [N] of `position`, asked for in order from 0; None when greedy."""
        if self._sampling.temperature == 0:
            return None
        if position % _AHEAD == 0:
            stop = min(position + _AHEAD, self._sampling.max_new_tokens)
            positions_K = torch.arange(position, stop, device=self._serials_N.device)
            self._uniforms_NK = uniforms(self._sampling, self._serials_N, self._completions_N, positions_K)
        return self._uniforms_NK[:, position % _AHEAD]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows."""
        self._serials_N, self._completions_N = self._serials_N[rows], self._completions_N[rows]
        self._uniforms_NK = self._uniforms_NK[rows]
