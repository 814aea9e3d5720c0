"""A data set with the user's own columns to the data contract: `prompt`, and for supervised training `completion`.

Only what was asked for is changed: columns that are not renamed stay, and rewards see them.
"""

from __future__ import annotations

from typing import Any

from lowpeak.cli.arguments import DataArguments
from lowpeak.errors import DataError

Row = dict[str, Any]


def shape(dataset: Any, arguments: DataArguments, *, supervised: bool = False) -> Any:
    """The data set with `prompt` (and `completion`) columns, in chat form where the arguments say so."""
    wanted = {"prompt": arguments.prompt_column}
    if supervised:
        wanted["completion"] = arguments.completion_column
    changed = {name: column for name, column in wanted.items() if name != column}
    for name, column in changed.items():
        dataset = _rename(dataset, column, name)
    if not arguments.conversational and arguments.system_prompt is None:
        return dataset
    return dataset.map(lambda row: in_chat_form(row, arguments.system_prompt, supervised=supervised))


def _rename(dataset: Any, column: str, name: str) -> Any:
    columns = dataset.column_names
    if columns is not None and column not in columns:
        raise DataError(f"the data set has no column {column!r} for the {name}; its columns are {', '.join(columns)}")
    if columns is not None and name in columns:
        dataset = dataset.remove_columns(name)
    return dataset.rename_column(column, name)


def in_chat_form(row: Row, system_prompt: str | None, *, supervised: bool = False) -> Row:
    """The row's prompt as messages, opened by the system's message when there is one.

    `{"prompt": "2+3"}` becomes `{"prompt": [{"role": "user", "content": "2+3"}]}`; with `supervised`, a completion that
    is a string becomes the assistant's message.
    """
    messages = _messages(row["prompt"], "user")
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    changed = {"prompt": messages}
    if supervised:
        changed["completion"] = _messages(row["completion"], "assistant")
    return changed


def _messages(text: str | list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)
