"""What the panel answers: rows with their rewards, and what was said about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowpeak.records import Metric, Record, merge_metrics


@dataclass(frozen=True)
class Judged:
    """N rows with their rewards.

    `prompts` are as the data set gave them and `texts` the decoded completions, one per row; `columns` is what rewards
    logged with `log_extra`, one value per row.
    """

    records: tuple[Record, ...]
    metrics: dict[str, Metric]
    columns: dict[str, list[Any]]
    texts: tuple[str, ...]
    prompts: tuple[Any, ...]

    def rows(self, indices: Sequence[int]) -> Judged:
        """These rows alone, with all metrics: they were measured on all that was judged."""
        return Judged(
            tuple(self.records[i] for i in indices),
            self.metrics,
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
            tuple(self.texts[i] for i in indices),
            tuple(self.prompts[i] for i in indices),
        )

    def renumbered(self, group: int) -> Judged:
        """The same rows as group `group`."""
        return replace(self, records=tuple(replace(record, group=group) for record in self.records))

    def merge(self, other: Judged) -> Judged:
        """These rows and then the other's; a column that one side lacks is None there."""
        names = dict.fromkeys((*self.columns, *other.columns))
        return Judged(
            self.records + other.records,
            merge_metrics(self.metrics, other.metrics),
            {name: self._column(name) + other._column(name) for name in names},
            self.texts + other.texts,
            self.prompts + other.prompts,
        )

    def _column(self, name: str) -> list[Any]:
        return self.columns.get(name) or [None] * len(self.records)
