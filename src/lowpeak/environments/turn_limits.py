"""Limits of the requests for turns of one conversation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TurnLimits:
    """Limits of a conversation's requests.

    max_prompt_tokens  of its first request (None: no limit)
    max_tokens         of a path after the prompt; all paths together have at most max_branches times as many
    max_turns          (None: no limit)
    idle_seconds       without a request, until its conversation ends (None: no limit)
    vocabulary_size    of the model
    """

    max_prompt_tokens: int | None
    max_tokens: int
    max_branches: int
    max_turns: int | None
    idle_seconds: float | None
    vocabulary_size: int
