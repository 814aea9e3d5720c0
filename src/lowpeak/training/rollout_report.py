"""A rollout's report: metrics of its completions' lengths, their rows in the journal, and a table of them in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowpeak.errors import show_controls
from lowpeak.records import Metric, Record
from lowpeak.rewards import Judged


def length_metrics(records: Sequence[Record]) -> dict[str, Metric]:
    """TRL's `completions/*`: lengths of all completions and of those that ended by themselves, share of those cut.

    A length counts the tokens that the policy wrote.
    """
    lengths = [float(record.completion.num_written) for record in records]
    ended = [float(r.completion.num_written) for r in records if r.completion.finish_reason == "stop"]
    metrics = {f"completions/{name}": metric for name, metric in _spread("length", lengths).items()}
    metrics |= {f"completions/{name}": metric for name, metric in _spread("terminated_length", ended).items()}
    cut = float(len(lengths) - len(ended))
    return metrics | {"completions/clipped_ratio": Metric(cut, float(len(lengths)))}


def _spread(name: str, values: Sequence[float]) -> dict[str, Metric]:
    if not values:
        return {}
    return {
        f"mean_{name}": Metric(sum(values), float(len(values))),
        f"min_{name}": Metric(min(values), 1.0, "min"),
        f"max_{name}": Metric(max(values), 1.0, "max"),
    }


def describe(judged: Judged, records: Sequence[Record], names: Sequence[str]) -> tuple[dict[str, object], ...]:
    """What the journal and the table of completions say of each row."""
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


_HIDDEN = ("group", "num_tokens", "finish_reason")


def print_completions(
    rows: Sequence[Mapping[str, object]], step: int, *, most: int | None = None, unique: bool = False
) -> None:
    """Print the first `most` rows (None: all); with `unique`, one of each group."""
    shown = _first_of_each_group(rows) if unique else list(rows)
    shown = shown[:most]
    if not shown:
        return
    columns = [name for name in shown[0] if name not in _HIDDEN]
    table = Table(title=f"step {step}", show_lines=True)
    for name in columns:
        table.add_column(name, justify="left" if name in ("prompt", "completion") else "right")
    for row in shown:
        table.add_row(*(Text(show_controls(_say(row.get(name)))) for name in columns))
    Console().print(table)


def _first_of_each_group(rows: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    firsts: dict[object, Mapping[str, object]] = {}
    for row in rows:
        firsts.setdefault(row["group"], row)
    return list(firsts.values())


def _say(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):  # messages
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in value)
    return str(value)
