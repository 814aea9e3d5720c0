"""Reports of a rollout: metrics of lengths and of the engine, journal rows, the table of completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowpeak.errors import show_controls
from lowpeak.records import Metric, Record, merge_metrics
from lowpeak.rewards import RewardedCompletions
from lowpeak.vllm.weight_sync import PushReport


@dataclass
class RolloutStats:
    """Counts of the engine's work since they were last popped.

    useful      tokens that the engine added to completions
    computed    positions that its forwards computed for them
    pushes      metrics of the weights that were sent to it
    """

    useful: int = 0
    computed: int = 0
    pushes: dict[str, Metric] = field(default_factory=dict)

    def add(self, useful: int, computed: int) -> None:
        self.useful += useful
        self.computed += computed

    def pop_useful_share(self) -> dict[str, Metric]:
        """Return the share of useful tokens since the last call; empty for an engine that does not count."""
        metric = Metric(float(self.useful), float(self.computed))
        self.useful = self.computed = 0
        return {"useful_tokens/rollout": metric} if metric.count else {}

    def add_push(self, report: PushReport) -> None:
        sums = {"bytes": report.num_bytes, "seconds": report.seconds, "proof_seconds": report.proof_seconds}
        new = {f"push/{name}": Metric(float(value), 1.0, "sum") for name, value in sums.items()}
        self.pushes = merge_metrics(self.pushes, new)

    def pop_pushes(self) -> dict[str, Metric]:
        """Return bytes and seconds of the pushes since the last call; empty on ranks that push nothing."""
        pushes, self.pushes = self.pushes, {}
        return pushes


def length_metrics(records: Sequence[Record]) -> dict[str, Metric]:
    """Return TRL's `completions/*`: lengths of all and of terminated completions, and the share of truncated ones.

    A length counts the tokens that the policy wrote.
    """
    lengths = [float(record.completion.num_written) for record in records]
    ended = [float(r.completion.num_written) for r in records if r.completion.finish_reason == "stop"]
    metrics = {f"completions/{name}": metric for name, metric in _spread("length", lengths).items()}
    metrics |= {f"completions/{name}": metric for name, metric in _spread("terminated_length", ended).items()}
    num_truncated = float(len(lengths) - len(ended))
    return metrics | {"completions/clipped_ratio": Metric(num_truncated, float(len(lengths)))}


def _spread(name: str, values: Sequence[float]) -> dict[str, Metric]:
    if not values:
        return {}
    return {
        f"mean_{name}": Metric(sum(values), float(len(values))),
        f"min_{name}": Metric(min(values), 1.0, "min"),
        f"max_{name}": Metric(max(values), 1.0, "max"),
    }


def completion_rows(
    judged: RewardedCompletions, records: Sequence[Record], names: Sequence[str]
) -> tuple[dict[str, object], ...]:
    """Return one row per completion, for the journal and for the table in the terminal."""
    rows = []
    for i, (record, text) in enumerate(zip(records, judged.texts, strict=True)):
        counted = record.advantages[record.completion.loss_mask] if record.advantages is not None else torch.zeros(0)
        row: dict[str, object] = {
            "group": record.group,
            "prompt": judged.prompts[i],
            "completion": text,
            "num_tokens": judged.records[i].completion.num_written,
            "finish_reason": record.completion.finish_reason,
            **{name: _or_none(value) for name, value in zip(names, record.rewards, strict=True)},
            "reward": _or_none(record.reward),
            "advantage": float(counted.mean()) if counted.numel() else 0.0,
        }
        row |= {column: values[i] for column, values in judged.columns.items()}
        rows.append(row)
    return tuple(rows)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


_NOT_IN_TABLE = ("group", "num_tokens", "finish_reason")


def print_completions(
    rows: Sequence[Mapping[str, object]], step: int, *, most: int | None = None, unique: bool = False
) -> None:
    """Print a table of the first `most` rows (None: all); with `unique`, one of each group."""
    shown = _first_of_each_group(rows) if unique else list(rows)
    shown = shown[:most]
    if not shown:
        return
    columns = [name for name in shown[0] if name not in _NOT_IN_TABLE]
    table = Table(title=f"step {step}", show_lines=True)
    for name in columns:
        table.add_column(name, justify="left" if name in ("prompt", "completion") else "right")
    for row in shown:
        table.add_row(*(Text(show_controls(_cell(row.get(name)))) for name in columns))
    Console().print(table)


def _first_of_each_group(rows: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    firsts: dict[object, Mapping[str, object]] = {}
    for row in rows:
        firsts.setdefault(row["group"], row)
    return list(firsts.values())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):  # messages
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in value)
    return str(value)
