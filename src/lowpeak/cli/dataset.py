"""The datasets of a run: opened, their columns renamed to `prompt` and its answers, and wrapped in chats on request.

Columns that are not renamed stay, and reward functions receive them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowpeak.arguments import EffectReport, require
from lowpeak.cli.arguments import DataArguments
from lowpeak.errors import ArgumentError, DataError, first_line

Row = dict[str, Any]
# The columns of a supervised dataset beside `prompt`; these jobs generate nothing and take no reward.
ANSWER_COLUMNS = {
    **dict.fromkeys(("sft", "kto"), ("completion",)),
    **dict.fromkeys(("reward", "dpo"), ("chosen", "rejected")),
}


def load_datasets(
    arguments: DataArguments, answers: Sequence[str], args: Any, effects: EffectReport
) -> tuple[Any, Any]:
    """Return the training set, None if the command names none, and the evaluation set, None if the run never evaluates.

    `args` is the config. An evaluation without --eval_dataset, --eval_split and --test_split_size reads the split `test`, as in
    TRL.
    """
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    if arguments.datasets:
        _refuse_with_mixture(arguments)
        train = map_columns(load_mixture(arguments.datasets, streaming=arguments.streaming), arguments, answers)
    elif arguments.dataset:
        train = _load_dataset(arguments.dataset, arguments.dataset_split, arguments, answers, effects)
    else:
        train = None
        _add_idle(arguments, effects)
    if arguments.test_split_size is not None:
        require(train is not None, "--test_split_size holds out rows of --dataset: name one, or leave it out.")
        train, held_out = hold_out(train, arguments.test_split_size, arguments, args.seed)
        if not evaluates:
            effects.add(
                f"test_split_size={arguments.test_split_size}",
                f"the run never evaluates; rows that it holds out, and does not train on: {len(held_out)}; set eval_strategy, or "
                "remove it",
            )
        return train, held_out if evaluates else None
    return train, _load_evaluation(arguments, answers, effects) if evaluates else None


def _add_idle(arguments: DataArguments, effects: EffectReport) -> None:
    """Add the arguments of a dataset that the command does not name: an environment has the rows."""
    read_by_both = ("streaming", "prompt_column", "conversational", "system_prompt")
    for name in ("dataset_config", "dataset_split", *(() if arguments.eval_dataset else read_by_both)):
        if (value := getattr(arguments, name)) != getattr(DataArguments, name):
            effects.add(f"--{name} {value}", "the command has no --dataset; the rows are the environment's")


def _load_dataset(
    source: str, split: str | None, arguments: DataArguments, answers: Sequence[str], effects: EffectReport
) -> Any:
    from lowpeak.data import is_on_hub, open_dataset

    config = arguments.dataset_config if source == arguments.dataset else None
    # A local file may replace the hub name of a YAML file, which then still sets the hub's split and config.
    if Path(source).exists():
        _add_hub_arguments(source, split, config, effects)
        split, config = local_split(Path(source), split), None
    dataset = open_dataset(source, split, config, streaming=arguments.streaming)
    # The journal, its report and the model card read the name here, which datasets itself leaves out.
    dataset.info.download_checksums = {f"hf://datasets/{source}@" if is_on_hub(source) else source: {}}
    return map_columns(dataset, arguments, answers)


def _load_evaluation(arguments: DataArguments, answers: Sequence[str], effects: EffectReport) -> Any:
    """Return the evaluation set; None if the command names none and the training data have no splits."""
    source, split = arguments.eval_dataset or arguments.dataset, arguments.eval_split
    if not source and split not in (None, "test"):
        raise ArgumentError(f"--eval_split {split} needs --eval_dataset: --datasets has no splits to evaluate on.")
    if not source or (arguments.eval_dataset is None and split is None and Path(source).is_file()):
        return None
    if arguments.eval_dataset is None and split is None:
        split = "test"
    return _load_dataset(source, split, arguments, answers, effects)


def _refuse_with_mixture(arguments: DataArguments) -> None:
    """Raise ArgumentError for arguments that name another dataset or split than --datasets."""
    for name in ("dataset", "dataset_config", "dataset_split"):
        if getattr(arguments, name) not in (None, "", "train"):
            raise ArgumentError(f"--{name} and --datasets set the same data: remove one of the two.")


def _open_entry(entry: Mapping[str, Any], streaming: bool) -> Any:
    from lowpeak.data import open_dataset

    unknown = sorted(set(entry) - {"path", "name", "data_dir", "data_files", "split", "columns", "fraction"})
    if unknown or not entry.get("path"):
        raise ArgumentError(f"An entry of datasets has {unknown or 'no path'}: {dict(entry)!r:.120}; correct it.")
    files = {name: entry[name] for name in ("data_dir", "data_files") if entry.get(name) is not None}
    split = entry.get("split") or "train"
    if Path(entry["path"]).exists():
        split = local_split(Path(entry["path"]), split)
    part = open_dataset(entry["path"], split, entry.get("name"), streaming=streaming, **files)
    return part if entry.get("columns") is None else part.select_columns(entry["columns"])


def load_mixture(entries: Sequence[Mapping[str, Any]], *, streaming: bool = False) -> Any:
    """Return the concatenation of datasets, each described by TRL's fields: `path`, `split`, `columns`, `fraction`, ...

    With fractions f_i of datasets of n_i rows, the first `round(f_i / sum(f) * N)` rows of each are taken, where N is the
    largest number for which no dataset is too short: `min(n_i * sum(f) / f_i)`.
    """
    import datasets

    parts = [_open_entry(entry, streaming) for entry in entries]
    fractions = [entry.get("fraction") for entry in entries]
    if any(fraction is not None for fraction in fractions):
        parts = _take_shares(parts, fractions)
    try:
        return datasets.concatenate_datasets(parts)
    except ValueError as error:
        raise DataError(
            f"The datasets cannot be concatenated: {first_line(error)}; give them the same columns with `columns`."
        ) from error


def _take_shares(parts: list[Any], fractions: Sequence[float | None]) -> list[Any]:
    """Return the first rows of each dataset, in shares that are proportional to the fractions."""
    known = [fraction for fraction in fractions if fraction is not None and fraction > 0]
    if len(known) < len(parts) or not all(hasattr(part, "__len__") for part in parts):
        raise ArgumentError("fraction must be above 0 for each of datasets, or for none, and needs streaming=False.")
    shares = [fraction / sum(known) for fraction in known]
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True))
    return [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]


def hold_out(dataset: Any, size: float, arguments: DataArguments, seed: int) -> tuple[Any, Any]:
    """Return the dataset without `size` random rows, and these rows; equal on all ranks."""
    if arguments.eval_dataset is not None or arguments.eval_split not in (None, "test"):
        raise ArgumentError(f"--test_split_size {size} and --eval_dataset or --eval_split set the same data: set one.")
    if not hasattr(dataset, "train_test_split"):
        raise ArgumentError(f"--test_split_size {size} needs data with a length: set --streaming false.")
    try:
        split = dataset.train_test_split(test_size=size if size < 1 else int(size), seed=seed)
    except ValueError as error:
        raise ArgumentError(f"--test_split_size {size} does not fit the data: {first_line(error)}.") from error
    return split["train"], split["test"]


def _add_hub_arguments(source: str, split: str | None, config: str | None, effects: EffectReport) -> None:
    """Add the arguments of a hub dataset without effect on a local file or folder."""
    name_of_split = None if split is None or Path(source).is_dir() else split.partition("[")[0]
    unused = {"split": name_of_split if name_of_split != "train" else None, "dataset_config": config}
    for name, value in unused.items():
        if value is not None:
            effects.add(f"{name}={value!r}", f"{source} is a local file or folder, which has none")


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
