"""Environments: what continues a conversation after each turn of the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak.environments.append import Message
from lowpeak.environments.calls import ParsedTurn


@dataclass(frozen=True)
class Opening:
    """The start of a conversation: text that is added to the prompt's last message, and the schemas of the tools."""

    text: str = ""
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Reply:
    """Messages that follow a turn, and the turn's reward; without messages the conversation ends."""

    messages: Sequence[Message] = ()
    reward: float | None = None


class Environment(ABC):
    """The surroundings of one conversation; it is reset for each conversation that it serves.

    Methods run in a thread of their own, or, if they are `async def`, on an event loop. `instance` is what rewards get as
    the conversation's environment.
    """

    instance: Any = None

    @abstractmethod
    def reset(self, seed: int, row: Mapping[str, Any]) -> Opening | Awaitable[Opening]:
        """Start a conversation for a row of the dataset; the completions of one prompt get the same seed."""

    @abstractmethod
    def step(self, turn: ParsedTurn) -> Reply | Awaitable[Reply]:
        """Return what follows a turn that the policy ended itself."""
