"""What the panel answers: rows with their rewards, and what was said about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
        """Return these rows alone, with all metrics: they were measured on all that was judged."""
        return Judged(
            tuple(self.records[i] for i in indices),
            self.metrics,
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
            tuple(self.texts[i] for i in indices),
            tuple(self.prompts[i] for i in indices),
        )

    def renumbered(self, groups: Sequence[int]) -> Judged:
        """Return the same rows, those of group g as group `groups[g]`."""
        return replace(self, records=tuple(replace(record, group=groups[record.group]) for record in self.records))


def merge_judged(parts: Sequence[Judged]) -> Judged:
    """Return the rows of several answers, one after another; a column that one of them lacks is None there."""
    names = dict.fromkeys(name for part in parts for name in part.columns)
    metrics: dict[str, Metric] = {}
    for part in parts:
        metrics = merge_metrics(metrics, part.metrics)
    return Judged(
        tuple(chain.from_iterable(part.records for part in parts)),
        metrics,
        {
            name: [value for part in parts for value in part.columns.get(name) or [None] * len(part.records)]
            for name in names
        },
        tuple(chain.from_iterable(part.texts for part in parts)),
        tuple(chain.from_iterable(part.prompts for part in parts)),
    )
