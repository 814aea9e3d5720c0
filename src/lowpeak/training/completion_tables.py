"""Tables of completions: printed, and sent to the trackers of `report_to` that show tables (wandb, trackio, TensorBoard)."""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from lowpeak.errors import first_line, show_controls

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, object]]
_NOT_IN_TABLE = ("group", "num_tokens", "finish_reason")
_NAME = "completions"  # of the table in a tracker, as in TRL


def print_completions(rows: Rows, step: int, *, most: int | None = None, unique: bool = False) -> None:
    """Print a table of the first `most` rows (None: all); with `unique`, one of each group."""
    shown = select_rows(rows, unique=unique)[:most]
    if not shown:
        return
    columns = _columns(shown)
    table = Table(title=f"step {step}", show_lines=True)
    for name in columns:
        table.add_column(name, justify="left" if name in ("prompt", "completion") else "right")
    for row in shown:
        table.add_row(*(Text(show_controls(_cell(row.get(name)))) for name in columns))
    Console().print(table)


def track_completions(rows: Rows, step: int, callbacks: Iterable[TrainerCallback], *, unique: bool = False) -> None:
    """Send all rows as a table to each tracker among the trainer's callbacks; with `unique`, one row of each group.

    A tracker that raises is named in a warning, and training goes on.
    """
    shown = select_rows(rows, unique=unique)
    for callback in callbacks:
        send = next((send for kind, send in _TRACKERS if isinstance(callback, kind)), None)
        if send is None or not shown:
            continue
        try:
            send(callback, step, _columns(shown), shown)
        except Exception as error:  # a tracker's service, disk or limits: any class
            logger.warning(
                "%s did not take the completions of step %d (%s); they are in the journal.",
                *(type(callback).__name__, step, first_line(error)),
            )


def select_rows(rows: Rows, *, unique: bool) -> list[Mapping[str, object]]:
    """Return all rows; with `unique`, the first of each group."""
    if not unique:
        return list(rows)
    firsts: dict[object, Mapping[str, object]] = {}
    for row in rows:
        firsts.setdefault(row["group"], row)
    return list(firsts.values())


def _columns(rows: Rows) -> list[str]:
    return [name for name in rows[0] if name not in _NOT_IN_TABLE]


def _send_to_wandb(callback: Any, step: int, columns: list[str], rows: Rows) -> None:
    import wandb

    if wandb.run is not None:
        table = wandb.Table(columns=["step", *columns], data=_data(step, columns, rows))
        wandb.log({_NAME: table, "train/global_step": step})


def _send_to_trackio(callback: Any, step: int, columns: list[str], rows: Rows) -> None:
    import trackio

    trackio.log({_NAME: trackio.Table(columns=["step", *columns], data=_data(step, columns, rows))})


def _send_to_tensorboard(callback: Any, step: int, columns: list[str], rows: Rows) -> None:
    if callback.tb_writer is not None:
        lines = [columns, ["--"] * len(columns), *([_markdown(row.get(name)) for name in columns] for row in rows)]
        callback.tb_writer.add_text(_NAME, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)


_TRACKERS: tuple[tuple[type[TrainerCallback], Callable[[Any, int, list[str], Rows], None]], ...] = (
    (WandbCallback, _send_to_wandb),
    (TrackioCallback, _send_to_trackio),
    (TensorBoardCallback, _send_to_tensorboard),
)


def _data(step: int, columns: list[str], rows: Rows) -> list[list[Any]]:
    """Return a tracker's rows, with lists and mappings as JSON: a tracker's column has one type."""
    return [[step, *(_plain(row.get(name)) for name in columns)] for row in rows]


def _plain(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value


def _markdown(value: Any) -> str:
    """Return a cell of a Markdown table that shows the text as it is."""
    return html.escape(_cell(value)).replace("|", "&#124;").replace("\n", "<br>")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):  # messages
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in value)
    return str(value)
