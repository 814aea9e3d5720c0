"""A data set with the user's own columns to the data contract: `prompt`, and where rows are trained on, their answers.

Only what was asked for is changed: columns that are not renamed stay, and rewards see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowpeak.cli.arguments import DataArguments
from lowpeak.errors import DataError

Row = dict[str, Any]


def shape(dataset: Any, arguments: DataArguments, answers: Sequence[str] = ()) -> Any:
    """Return the data set with `prompt` and `answers` (completion; chosen, rejected) as columns, in chat form where told so."""
    for name in ("prompt", *answers):
        column, columns = getattr(arguments, f"{name}_column"), dataset.column_names
        if column == name:
            continue
        if columns is not None and column not in columns:
            raise DataError(
                f"the data set has no column {column!r} for the {name}; its columns are {', '.join(columns)}"
            )
        if columns is not None and name in columns:
            dataset = dataset.remove_columns(name)
        dataset = dataset.rename_column(column, name)
    if not arguments.conversational and arguments.system_prompt is None:
        return dataset
    return dataset.map(lambda row: in_chat_form(row, arguments.system_prompt, answers))


def in_chat_form(row: Row, system_prompt: str | None, answers: Sequence[str] = ()) -> Row:
    """Return the row's prompt as messages, opened by the system's message when there is one, and its answers as messages.

    `{"prompt": "2+3"}` becomes `{"prompt": [{"role": "user", "content": "2+3"}]}`; an answer becomes the assistant's message.
    """
    for name in ("prompt", *answers):
        if name not in row:
            raise DataError(f"a chat is made of the column {name!r}, which the data set has not; set {name}_column.")
    messages = _messages(row["prompt"], "user")
    if system_prompt is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return {"prompt": messages, **{name: _messages(row[name], "assistant") for name in answers}}


def _messages(text: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(text, str):
        return [{"role": role, "content": text}]
    if not isinstance(text, list) or not text or not isinstance(text[0], dict):
        raise DataError(
            f"a row has {text!r:.60} where a chat is made of a text or a list of messages; mend or filter such rows."
        )
    return list(text)
