"""The reward protocol: what judges. TRL's contract, so that a TRL user's functions run as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Reward(Protocol):
    """Scores completions: one float per completion, or None where it does not apply.

    In place of a float a completion may have a list with one for each of its tokens: PPO puts them where they are, and for
    every other algorithm their sum is the completion's.

    Called with keywords: `prompts` and `completions` (strings, or lists of messages), `completion_ids`, each data set
    column by its name, `trainer_state`, `log_extra` and `log_metric`. A call sees whole groups, rows in order. Metric keys and
    errors have `name`.
    """

    @property
    def name(self) -> str: ...

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[list[int]], **columns: Any
    ) -> list[float | None]: ...
