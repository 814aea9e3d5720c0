"""A wave of prompts that an engine has accepted, whose completions may not exist yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from lowpeak.records import Group


@runtime_checkable
class Pending(Protocol):
    """The groups of one `RolloutEngine.submit`, complete or not; only the thread that submitted calls its methods."""

    def result(self) -> list[Group]:
        """Wait for the groups and return them in the order of the prompts; a later call returns the same ones.

        After a LostEngineError and a `load`, the next call requests only the completions that are missing.
        """

    def abort(self) -> None:
        """Drop the groups and stop work on them; the engine can `load` afterwards. It must not raise."""


class GeneratedOnResult:
    """Groups of an engine that generates while its caller waits in `result`."""

    def __init__(self, generate: Callable[[], list[Group]]) -> None:
        self._generate = generate
        self._groups: list[Group] | None = None

    def result(self) -> list[Group]:
        if self._groups is None:
            self._groups = self._generate()
        return self._groups

    def abort(self) -> None:
        self._groups = None
