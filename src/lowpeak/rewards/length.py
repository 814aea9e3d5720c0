"""Rewards for length, in tokens: none is above 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak.errors import ArgumentError


@dataclass(frozen=True)
class SoftOverlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), for a completion of L tokens.

    0 up to `max_length - cache`, then `(max_length - cache - L) / cache`, and -1 beyond `max_length`.
    """

    max_length: int
    cache: int

    def __post_init__(self) -> None:
        if not 0 <= self.cache <= self.max_length:
            raise ArgumentError(
                f"soft_overlong's cache must be from 0 to max_length {self.max_length}, not {self.cache}."
            )

    @property
    def __name__(self) -> str:
        return "soft_overlong"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """One punishment in [-1, 0] per completion."""
        return [self._punish(len(ids)) for ids in completion_ids]

    def _punish(self, length: int) -> float:
        if length > self.max_length:
            return -1.0
        return min(0.0, (self.max_length - self.cache - length) / self.cache) if self.cache else 0.0


@dataclass(frozen=True)
class LinearLength:
    """`-per_token * max(0, L - free)` for a completion of L tokens."""

    per_token: float = 0.001
    free: int = 0

    @property
    def __name__(self) -> str:
        return "length_penalty"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """One penalty, 0 or less, per completion."""
        return [-self.per_token * max(0, len(ids) - self.free) for ids in completion_ids]


length_penalty = LinearLength()
