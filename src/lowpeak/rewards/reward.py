"""The reward protocol: TRL's contract, so that TRL users' functions run unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Reward(Protocol):
    """A callable that returns one float per completion, or None where it does not apply.

    Instead of a float it may return a list with one number for each of the completion's tokens: PPO places them at the
    tokens; every other algorithm uses their sum.

    A call gets keywords: `prompts` and `completions` (strings, or lists of messages), `completion_ids`, each dataset
    column by its name, `trainer_state`, `log_extra` and `log_metric`. It gets complete groups, in order. Metric keys and
    errors contain `name`.
    """

    @property
    def name(self) -> str: ...

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[list[int]], **columns: Any
    ) -> list[float | None]: ...
