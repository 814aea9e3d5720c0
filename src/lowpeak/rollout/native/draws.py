"""The hashed uniforms of rows, made a whole group ahead: their making costs a hundred small operations each time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.slots import Wave
from lowpeak.rollout.sampling import uniforms

_MAX_DRAWS = 1 << 18  # made at once: philox keeps about ten int64 words for each


class Draws:
    """The uniforms of `num_rows` rows at all positions of their completions, 8 bytes each; none when greedy."""

    def __init__(self, num_rows: int, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._is_greedy = sampling.temperature == 0
        shape = (0, 0) if self._is_greedy else (num_rows, sampling.max_new_tokens)
        self._uniforms_RC = torch.empty(shape, dtype=torch.float64, device=device)

    def make(self, rows: Sequence[int], wave: Wave, prompts: Sequence[Prompt]) -> None:
        """Draw for `rows`, which are the `wave`'s of these prompts."""
        if self._is_greedy:
            return
        device, num_positions = self._uniforms_RC.device, self._uniforms_RC.shape[1]
        serials = [prompts[row.prompt].serial for row in wave]
        completions = [self._sampling.first_completion + row.completion for row in wave]
        named = torch.tensor([rows, serials, completions]).to(device)
        positions_C = torch.arange(num_positions, device=device)
        for part in named.split(max(1, _MAX_DRAWS // num_positions), dim=1):
            self._uniforms_RC[part[0]] = uniforms(self._sampling, part[1], part[2], positions_C)

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor | None:
        """The uniforms [N] of these rows, each at its own position; None when greedy."""
        return None if self._is_greedy else self._uniforms_RC[rows_N, positions_N]
