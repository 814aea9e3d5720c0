"""Results of calls of functions, kept so that a call whose result is known does not run twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

ResultRow = Mapping[str, Any]  # key, name, arguments, result or error, seconds: as in the journal


@dataclass(eq=False)
class ToolResults:
    """Results of a run's rollouts, and those that an interrupted run left for unfinished ones.

    A key names all that a call depends on: weights, rollout, conversation, tokens so far and place in the turn. `write` gets each
    new row. `read` returns the rows of the interrupted run by key; None as long as there is no run.
    """

    write: Callable[[ResultRow], None] = lambda row: None
    read: Callable[[], Mapping[str, ResultRow] | None] = dict
    journaled: dict[str, ResultRow] | None = None
    _last: RolloutResults | None = None

    def begin(self, rollout: str) -> RolloutResults:
        """Return the results of this rollout; one that is generated again finds its earlier results."""
        if self.journaled is None and (journaled := self.read()) is not None:
            self.journaled = dict(journaled)
        if self._last is None or self._last.rollout != rollout:
            self._last = RolloutResults(self, rollout)
        return self._last


@dataclass(eq=False)
class RolloutResults:
    """The results of one rollout; `rows` has them by a call's name, which is unique in it."""

    run: ToolResults
    rollout: str
    rows: MutableMapping[str, ResultRow] = field(default_factory=dict)

    def find(self, name: str) -> ResultRow | None:
        """Return the row of a call, if its result is known."""
        key = f"{self.rollout}/{name}"
        if self.run.journaled and key in self.run.journaled:
            self.rows[name] = self.run.journaled.pop(key)
        return self.rows.get(name)

    def add(self, name: str, row: ResultRow) -> None:
        """Keep the result of a call, and write it."""
        self.rows[name] = row
        self.run.write({"key": f"{self.rollout}/{name}", **row})
