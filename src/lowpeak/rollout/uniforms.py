"""Uniforms of the native engine: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A draw depends on (seed, rollout, prompt serial, completion, position) alone. Shapes: N sequences, K positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowpeak.arguments import Sampling
from lowpeak.device_kind import widest_float

_LOW_16 = 0xFFFF
_LOW_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
MAX_DRAWS = 1 << 18  # per philox call, which needs about ten int64 words for each


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words per counter, as int64: Philox4x32-10 of four counter words and two key words.

    The counter's words may have any shapes that broadcast. Products are computed in 16-bit halves, so that they fit
    int64 on any device.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW_32, (k1 + _WEYL[1]) & _LOW_32
    return c0, c1, c2, c3


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of the products of 32-bit words with a 32-bit factor."""
    low = (words & _LOW_16) * factor
    high = (words >> 16) * factor + (low >> 16)
    return high >> 16, ((high & _LOW_16) << 16) | (low & _LOW_16)


def uniforms(sampling: Sampling, serials_N: Tensor, completions_N: Tensor, positions_K: Tensor) -> Tensor:
    """Return uniforms [N, K] in [0, 1), one per sequence and position: float64 with 53 random bits.

    On a device without float64: float32 with the first 24 bits. All arguments are int64 on one device; serials,
    completions and positions have at most 32 bits. Positions may also be [N, K].
    """
    rollout = torch.full((), sampling.rollout & _LOW_32, dtype=torch.int64, device=serials_N.device)
    counter = (positions_K, completions_N[:, None], serials_N[:, None], rollout)
    first, second, _, _ = philox(counter, (sampling.seed & _LOW_32, (sampling.seed >> 32) & _LOW_32))
    if widest_float(first.device) == torch.float32:
        return (first >> 8).float() * 2.0**-24
    return ((first << 21) | (second >> 11)).double() * 2.0**-53


class UniformDraws:
    """Uniforms of `num_rows` sequences at all completion positions, 8 bytes each; none when greedy.

    They are made for a whole group in advance, because each call takes about a hundred small operations.
    """

    def __init__(self, num_rows: int, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._is_greedy = sampling.temperature == 0
        shape = (0, 0) if self._is_greedy else (num_rows, sampling.max_new_tokens)
        self._uniforms_RC = torch.empty(shape, dtype=widest_float(device), device=device)

    def make(self, rows: Sequence[int], keys: Sequence[tuple[int, int]]) -> None:
        """Draw for `rows` with their keys: a prompt's serial and a completion's number, or those of a later turn."""
        if self._is_greedy:
            return
        device, num_positions = self._uniforms_RC.device, self._uniforms_RC.shape[1]
        counters = torch.tensor([(row, *key) for row, key in zip(rows, keys, strict=True)]).T.to(device)
        positions_C = torch.arange(num_positions, device=device)
        for part in counters.split(max(1, MAX_DRAWS // num_positions), dim=1):
            self._uniforms_RC[part[0]] = uniforms(self._sampling, part[1], part[2], positions_C)

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor | None:
        """Return the uniforms [N] of these sequences at their positions; None when greedy."""
        return None if self._is_greedy else self._uniforms_RC[rows_N, positions_N]
