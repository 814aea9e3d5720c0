"""Readers of dataset rows, datasets with random access or as streams, and checks of tokenizers.

Rows are counted from 0. A reader returns None for a row that is dropped.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from rich.console import Console
from rich.progress import track

from lowpeak.data.chat import Messages, check_messages, template_options
from lowpeak.errors import ArgumentError, DataError, ModelError, first_line

logger = logging.getLogger(__name__)

Item_co = TypeVar("Item_co", covariant=True)

_BATCH = 1000
_SHOW_PROGRESS_FROM = 20_000


class RowReader(ABC, Generic[Item_co]):
    """A reader that turns rows into prompts, records or pairs; None drops a row.

    `drop_reason` completes the sentence "3 of 10 rows are dropped: ...". `prepare(row)` returns the columns that TRL's trainer
    adds to a row, `prepared_columns`. `chat_template_kwargs` are the chat template's arguments; those of a row have priority.
    `num_embeddings` is the number of tokens that the model embeds (None: not checked), `media_token_ids` are those in place of
    images and sound. `report_idle(argument, reason)` is called for each row on which an argument has no effect. An invalid row
    raises DataError with its index.
    """

    drop_reason: str
    max_length: int | None = None
    prepared_columns: tuple[str, ...] = ()

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        num_embeddings: int | None = None,
        media_token_ids: frozenset[int] = frozenset(),
        report_idle: Callable[[str, str], object] = lambda argument, reason: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template_defaults = dict(chat_template_kwargs or {})
        self._num_embeddings = num_embeddings
        self._media_token_ids = media_token_ids
        self._report_idle = report_idle
        self._warned = False

    @abstractmethod
    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Item_co | None:
        """Read one row; `index` is its index in the dataset, for errors (None: `serial`)."""

    def is_truncated(self, item: Any) -> bool:
        """Return whether the end of the item's row was removed, because the row has more than `max_length` tokens."""
        return False

    def read_batch(self, rows: Sequence[Mapping[str, Any]], first: int) -> Sequence[Item_co | None]:
        """Read consecutive rows; `first` is the first one's index and serial."""
        return [self.read(row, i) for i, row in enumerate(rows, first)]

    def _read_chat(
        self, row: Mapping[str, Any], turns: Sequence[Any], where: str, part: str
    ) -> tuple[Messages, dict[str, Any]]:
        """Return a row's checked messages and the chat template's options for them."""
        messages = check_messages(turns, f"{where}: {part}")
        options = template_options(row, self._template_defaults, where)
        if getattr(self._tokenizer, "chat_template", None) is None and options.get("chat_template") is None:
            raise DataError(
                f"{where}: {part} is a list of messages, but the tokenizer has no chat template; set tokenizer.chat_template, "
                "use the tokenizer of an instruct model, or write the prompts as strings."
            )
        return messages, options

    def _report_text(self, where: str) -> None:
        """Report that chat_template_kwargs have no effect on a row of text."""
        if self._template_defaults:
            remedy = "remove the argument, or write the rows as lists of messages"
            self._report_idle(f"chat_template_kwargs={self._template_defaults!r}", f"{where} is text: {remedy}")

    def _encode_text(self, text: str) -> list[int]:
        """Return the token ids of plain text, with one end-of-sequence token at the end."""
        ids, end = self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _completion_start(self, prompt_ids: list[int], ids: list[int], where: str) -> int:
        """Return the index of the first token that is not the prompt's, as in TRL."""
        start = common_prefix_length(prompt_ids, ids)
        if start < len(prompt_ids) and not self._warned:
            self._warned = True
            logger.warning(
                "%s: the tokens of prompt and completion together do not begin with the tokens of the prompt alone (they differ "
                "after %d of %d), so the model trains on another context than it will generate from; end prompts at a token "
                "boundary, or use a chat template that writes the prompt the same way both times. Logged once.",
                *(where, start, len(prompt_ids)),
            )
        return start

    def _check_ids(self, ids: Sequence[int], where: str) -> None:
        """Raise DataError for a token without an embedding, which would crash the device, or for an image's."""
        if ids and min(ids) < 0:
            raise DataError(f"{where} has the token {min(ids)}; token ids must be integers of 0 or more.")
        if self._num_embeddings is not None and ids and max(ids) >= self._num_embeddings:
            raise DataError(
                f"{where} has the token {max(ids)}, but the model embeds only {self._num_embeddings} tokens: use the model's "
                "tokenizer, or call model.resize_token_embeddings(len(tokenizer))."
            )
        for token in self._media_token_ids.intersection(ids):
            raise DataError(
                f"{where} has the token {token}, which stands for an image, a video or sound; lowpeak trains on text only, "
                "remove the row."
            )


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences of tokens or characters."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    # Slices are compared in C, so a bisection is faster than a scan.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def read_integers(row: Mapping[str, Any], name: str, where: str, length: int | None = None) -> list[int]:
    """Return a column's integers, one per token, from a list, a tensor or an array."""
    try:
        integers = [_integer(number) for number in row.get(name)]  # type: ignore[union-attr]
    except (OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{where} has {name!r} {row.get(name)!r:.40}; it must be a list of integers.") from error
    if length is not None and len(integers) != length:
        raise DataError(f"{where} has {len(integers)} {name!r} for {length} 'input_ids'; pass one for each.")
    return integers


def _integer(number: Any) -> int:
    if isinstance(number, str) or int(number) != number:
        raise ValueError("not an integer")
    return int(number)


def num_rows(dataset: Dataset | IterableDataset, name: str = "The dataset") -> int | None:
    """Return the number of rows, None for a stream.

    Raises DataError if the dataset is empty, has several splits, or is an object of another kind.
    """
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        splits = ", ".join(map(repr, sorted(map(str, dataset)))) or "none"
        raise DataError(f"{name} has the splits {splits}; pass one of them, as in dataset['train'].")
    # Objects that have a length, but not a length in rows: a path, a mapping of columns, a table of pandas.
    conversions = (
        (isinstance(dataset, str | os.PathLike), "load_dataset('json', data_files=..., split='train')"),
        (isinstance(dataset, Mapping), "Dataset.from_dict(...)"),
        (hasattr(dataset, "iloc"), "Dataset.from_pandas(...)"),
    )
    for applies, conversion in conversions:
        if applies:
            raise DataError(
                f"{name} must be a dataset, got a {type(dataset).__name__}; convert it with datasets.{conversion}."
            )
    if not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise DataError(f"{name} must be a dataset, got {dataset!r:.80} of type {type(dataset).__name__}.")
    if not hasattr(dataset, "__len__"):
        return None
    if len(dataset) == 0:
        raise DataError(f"{name} is empty; check its file, its split or the filter that created it.")
    return len(dataset)


def fetch_rows(dataset: Any, indices: list[int]) -> list[Mapping[str, Any]]:
    """Return the rows of these indices; DataError if they cannot be read."""
    # Fetches all rows at once if the dataset supports it.
    getitems = getattr(dataset, "__getitems__", None)
    try:
        return getitems(indices) if getitems else [dataset[i] for i in indices]
    except Exception as error:
        # Arrow's errors about a damaged file, or a transform's.
        raise DataError(
            f"Rows {indices[0]} to {indices[-1]} of the dataset cannot be read ({type(error).__name__}: {first_line(error)}): "
            "check its files and its transform."
        ) from error


def read_items(dataset: Dataset | IterableDataset, reader: RowReader[Item_co]) -> Iterator[tuple[int, Item_co | None]]:
    """Yield each row's index and item, with a thousand rows in memory at a time."""
    first = 0
    for rows in _batches(dataset):
        yield from enumerate(reader.read_batch(rows, first), first)
        first += len(rows)
    if first == 0:
        raise DataError("The dataset is empty: its stream ended before the first row; check its source.")


def _batches(dataset: Dataset | IterableDataset) -> Iterator[list[Mapping[str, Any]]]:
    size = num_rows(dataset)
    if size is None:
        rows = iter(dataset)
        while batch := list(islice(rows, _BATCH)):
            yield batch
        return
    starts = range(0, size, _BATCH)
    quiet = size < _SHOW_PROGRESS_FROM
    console = Console(stderr=True)
    for start in track(starts, "Checking rows", console=console, transient=True, disable=quiet):
        yield fetch_rows(dataset, list(range(start, min(start + _BATCH, size))))


def with_prepared_columns(dataset: Any, reader: Any) -> Any:
    """Return a dataset, or each of several, with the reader's prepared columns, computed when a row is read.

    Streams, lists of rows and datasets with a transform of their own are returned unchanged.
    """
    if isinstance(dataset, dict):
        return {name: with_prepared_columns(each, reader) for name, each in dataset.items()}
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return dataset
    added = [name for name in reader.prepared_columns if name not in dataset.column_names]
    # A column of nothing makes the name known. With an index of rows, as after shuffle(), it would copy the dataset.
    for name in added if dataset._indices is None else ():
        dataset = dataset.add_column(name, [None] * len(dataset))
    return dataset.with_transform(partial(_prepare_batch, reader, added))


def _prepare_batch(reader: Any, added: Sequence[str], batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    given = {name: values for name, values in batch.items() if name not in added}
    rows = [reader.prepare(dict(zip(given, row, strict=True))) for row in zip(*given.values(), strict=True)]
    return given | {name: [row[name] for row in rows] for name in reader.prepared_columns}


def without_prepared_columns(dataset: Any) -> Any:
    """Return the dataset whose columns were prepared, or some of its rows."""
    transform: Any = dataset.format["format_kwargs"].get("transform") if isinstance(dataset, Dataset) else None
    if getattr(transform, "func", None) is not _prepare_batch:
        return dataset
    return dataset.with_format(None).remove_columns([name for name in transform.args[1] if name in dataset.features])


def filter_rows(dataset: Dataset, reader: RowReader[Any]) -> Any:
    """Return the dataset without the rows that the reader drops; logs how many it drops and truncates.

    A list of rows is a dataset too. Raises DataError for the first invalid row, for an empty dataset, and if all rows are
    dropped.
    """
    kept, num_truncated = [], 0
    for index, item in read_items(dataset, reader):
        if item is not None:
            kept.append(index)
            num_truncated += reader.is_truncated(item)
    _log_truncated_rows(num_truncated, len(dataset), reader)
    log_dropped_rows(len(dataset) - len(kept), len(dataset), reader)
    if len(kept) == len(dataset):
        return dataset
    return dataset.select(kept) if hasattr(dataset, "select") else [dataset[i] for i in kept]


def read_all(dataset: Dataset | IterableDataset, reader: RowReader[Item_co]) -> list[Item_co]:
    """Return the items of all rows that are not dropped; log how many rows are dropped and truncated."""
    items = [item for _, item in read_items(dataset, reader)]
    kept = [item for item in items if item is not None]
    _log_truncated_rows(sum(map(reader.is_truncated, kept)), len(items), reader)
    log_dropped_rows(len(items) - len(kept), len(items), reader)
    return kept


def _log_truncated_rows(num_truncated: int, num_rows: int, reader: RowReader[Any]) -> None:
    if num_truncated:
        logger.warning(
            "%d of %d rows are longer than %s tokens (max_length, or the model's context if that is less) and are truncated at "
            "their end.",
            *(num_truncated, num_rows, reader.max_length),
        )


def log_dropped_rows(num_dropped: int, num_rows: int, reader: RowReader[Any]) -> None:
    """Log the number of dropped rows and the reason; DataError if no row is left."""
    if num_dropped == num_rows:
        raise DataError(f"All {num_rows} rows are dropped: {reader.drop_reason}; change the rows or the settings.")
    if num_dropped:
        logger.warning("%d of %d rows are dropped: %s.", num_dropped, num_rows, reader.drop_reason)


def check_max_steps(dataset: Any, max_steps: int) -> None:
    """Raise ArgumentError if training on a stream would never end."""
    if dataset is not None and num_rows(dataset, "train_dataset") is None and max_steps <= 0:
        raise ArgumentError(
            f"max_steps={max_steps} does not end the run, and the dataset has no length: set max_steps."
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ModelError if the object is not a tokenizer, or has no token to pad with."""
    if not hasattr(tokenizer, "eos_token_id") and not hasattr(tokenizer, "image_processor"):
        raise ModelError(
            f"processing_class must be a tokenizer, got {tokenizer!r:.80} of type {type(tokenizer).__name__}; load one with "
            "AutoTokenizer.from_pretrained."
        )
    if hasattr(tokenizer, "image_processor"):
        raise ModelError("processing_class is an image processor; pass its .tokenizer: lowpeak trains on text only.")
    padding_id(tokenizer)


def check_special_tokens(tokenizer: Any, num_embeddings: int | None) -> None:
    """Raise ModelError if the model does not embed the tokenizer's pad or end-of-sequence token."""
    for name in ("pad_token", "eos_token"):
        token_id = getattr(tokenizer, f"{name}_id")
        if num_embeddings is not None and token_id is not None and token_id >= num_embeddings:
            raise ModelError(
                f"The tokenizer's {name} {getattr(tokenizer, name)!r} is token {token_id}, but the model embeds only "
                f"{num_embeddings} tokens: use the model's tokenizer with its tokenizer_config.json, or set another {name}."
            )


def padding_id(tokenizer: Any) -> int:
    """Return the token that pads micro-batches on the right: the pad token, else the end-of-sequence token.

    Padding is never read, so the tokenizer itself needs no pad token.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ModelError("The tokenizer has neither a pad nor an eos token; set tokenizer.eos_token (or pad_token).")
