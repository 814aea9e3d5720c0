"""Results of calls of functions, kept so that a call whose result is known does not run twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ResultRow = Mapping[str, Any]  # key, name, arguments, result or error, seconds: as in the journal


@dataclass(eq=False)
class ToolResults:
    """The results of the present rollout, and those that an interrupted run left for the rollouts that it did not finish.

    A key names all that a call depends on: weights, rollout, conversation, tokens so far and place in the turn. `write` gets each
    new row. `read` returns the rows of the interrupted run by key; None as long as there is no run.
    """

    write: Callable[[ResultRow], None] = lambda row: None
    read: Callable[[], Mapping[str, ResultRow] | None] = dict
    _journaled: dict[str, ResultRow] | None = None
    _current: dict[str, ResultRow] = field(default_factory=dict)
    _rollout: str = ""

    def begin(self, rollout: str) -> None:
        """Keep results for this rollout: generated again after an error, it finds them."""
        if self._journaled is None and (journaled := self.read()) is not None:
            self._journaled = dict(journaled)
        if rollout != self._rollout:
            self._rollout = rollout
            self._current.clear()

    def find(self, name: str) -> ResultRow | None:
        """Return the row of a call of the present rollout, if its result is known."""
        key = f"{self._rollout}/{name}"
        if self._journaled and key in self._journaled:
            self._current[key] = self._journaled.pop(key)
        return self._current.get(key)

    def add(self, name: str, row: ResultRow) -> None:
        """Keep the result of a call of the present rollout, and write it."""
        key = f"{self._rollout}/{name}"
        self._current[key] = row
        self.write({"key": key, **row})
