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
from lowpeak.journal import conversation_text

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, object]]
_NAME = "completions"  # of the table in a tracker, as in TRL


def print_completions(rows: Rows, step: int, *, most: int | None = None, unique: bool = False) -> None:
    """Print a table of the first `most` rows (None: all); with `unique`, one of each group."""
    shown = [_cells(row) for row in select_rows(rows, unique=unique)[:most]]
    if not shown:
        return
    columns = [*shown[0]]
    table = Table(title=f"step {step}", show_lines=True)
    for name in columns:
        table.add_column(name, justify="left" if name in ("prompt", "completion") else "right", overflow="fold")
    for row in shown:
        table.add_row(*(Text(show_controls(_cell(row.get(name)))) for name in columns))
    Console().print(table)


def track_completions(rows: Rows, step: int, callbacks: Iterable[TrainerCallback], *, unique: bool = False) -> None:
    """Send all rows as a table to each tracker among the trainer's callbacks; with `unique`, one row of each group.

    A tracker that raises is named in a warning, and training goes on.
    """
    shown = [_cells(row) for row in select_rows(rows, unique=unique)]
    for callback in callbacks:
        send = next((send for kind, send in _TRACKERS if isinstance(callback, kind)), None)
        if send is None or not shown:
            continue
        try:
            send(callback, step, [*shown[0]], shown)
        except Exception as error:  # a tracker's service, disk or limits: any class
            logger.warning(
                "%s did not take the completions of step %d (%s); they are in the journal.",
                *(type(callback).__name__, step, first_line(error)),
            )


def select_rows(rows: Rows, *, unique: bool) -> list[Mapping[str, object]]:
    """Return all rows; with `unique`, the first of each group."""
    firsts = {row["group"]: row for row in reversed(rows)} if unique else {}
    return [row for row in rows if not unique or row is firsts[row["group"]]]


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's values by the names of TRL's columns; one whose name is taken has the prefix `rewards/` or `extra/`."""
    totals = {"reward": row["reward"], "advantage": row["advantage"]}
    cells = {"prompt": row["prompt"], "completion": _text(row["completion"])}
    for kind, values in (("rewards", row["rewards"]), ("", totals), ("extra", row.get("extra", {}))):
        for name, value in values.items():
            is_taken = kind and (name in cells or name in totals or name == "step")
            cells[f"{kind}/{name}" if is_taken else name] = value
    return cells


def _text(completion: Any) -> str:
    """Return a completion's text; of a conversation, its turns with their calls and results."""
    is_text = isinstance(completion, list) and len(completion) == 1 and "tool_calls" not in completion[0]
    return str(completion[0]["content"]) if is_text else _cell(completion)


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
        return conversation_text(value)
    return str(value)
