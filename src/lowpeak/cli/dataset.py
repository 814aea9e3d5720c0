"""The datasets of a run: opened, their columns renamed to `prompt` and its answers, and wrapped in chats on request.

Columns that are not renamed stay, and reward functions receive them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowpeak.cli.arguments import DataArguments
from lowpeak.errors import DataError

Row = dict[str, Any]


def load_datasets(arguments: DataArguments, answers: Sequence[str], args: Any) -> tuple[Any, Any]:
    """Return the training set and the evaluation set (None without --eval_dataset and --eval_split); `args` is the config."""
    from lowpeak.data import open_dataset

    def load(source: str, split: str | None, config: str | None) -> Any:
        # A local file may replace the hub name of a YAML file, which then still sets the hub's split and config.
        if Path(source).exists():
            _name_hub_arguments(source, split, config, args)
            split, config = local_split(Path(source), split), None
        return map_columns(open_dataset(source, split, config), arguments, answers)

    train = load(arguments.dataset, arguments.dataset_split, arguments.dataset_config)
    if arguments.eval_dataset is None and arguments.eval_split is None:
        return train, None
    source = arguments.eval_dataset or arguments.dataset
    config = arguments.dataset_config if source == arguments.dataset else None
    return train, load(source, arguments.eval_split, config)


def _name_hub_arguments(source: str, split: str | None, config: str | None, args: Any) -> None:
    """Name, as other arguments without effect, those of a hub dataset that have no effect on a local file or folder."""
    from lowpeak.arguments import warn_or_raise

    name_of_split = None if split is None or Path(source).is_dir() else split.partition("[")[0]
    unused = {"split": name_of_split if name_of_split != "train" else None, "dataset_config": config}
    for name, value in unused.items():
        if value is not None:
            warn_or_raise(args, f"{name}={value!r} has no effect: {source} is a local file or folder, which has none")


def local_split(source: Path, split: str | None) -> str | None:
    """Return the split to open of a local dataset.

    A file has one split, whatever its name: `test[:64]` is its first 64 rows. Folders have named splits.
    """
    if split is None or source.is_dir():
        return split
    return "train" + split[split.index("[") :] if "[" in split else None


def map_columns(dataset: Any, arguments: DataArguments, answers: Sequence[str] = ()) -> Any:
    """Return the dataset with `prompt` and `answers` (completion; chosen, rejected) as columns, in chat form if asked."""
    for name in ("prompt", *answers):
        column, columns = getattr(arguments, f"{name}_column"), dataset.column_names
        if column == name:
            continue
        if columns is not None and column not in columns:
            raise DataError(
                f"the dataset has no column {column!r} for the {name}: set --{name}_column to one of {', '.join(columns)}."
            )
        if columns is not None and name in columns:
            dataset = dataset.remove_columns(name)
        dataset = dataset.rename_column(column, name)
    if not arguments.conversational and arguments.system_prompt is None:
        return dataset
    return dataset.map(lambda row: to_chat(row, arguments.system_prompt, answers))


def to_chat(row: Row, system_prompt: str | None, answers: Sequence[str] = ()) -> Row:
    """Return the row's prompt as user messages and its answers as assistant messages.

    `{"prompt": "2+3"}` becomes `{"prompt": [{"role": "user", "content": "2+3"}]}`. `system_prompt` opens a chat that has no
    system message.
    """
    for name in ("prompt", *answers):
        if name not in row:
            raise DataError(f"the dataset has no column {name!r} to make a chat of; set {name}_column.")
    messages = _messages(row["prompt"], "user")
    if system_prompt is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return {"prompt": messages, **{name: _messages(row[name], "assistant") for name in answers}}


def _messages(text: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(text, str):
        return [{"role": role, "content": text}]
    if not isinstance(text, list) or not text or not isinstance(text[0], dict):
        raise DataError(
            f"a row has {text!r:.60}, but a chat is made of a string or a list of messages; correct or filter such rows."
        )
    return list(text)
