"""A readable table of prompts, completions and rewards, printed as training goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowpeak.errors import show_controls

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
