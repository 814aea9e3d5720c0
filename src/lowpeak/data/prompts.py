"""The data contract: what a row must be to become a prompt, and the check of a whole data set before a run starts.

A row has a `prompt`, a string or a list of messages; all its other columns go to the rewards. Rows are counted from 0.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Generic, Literal, TypeVar

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from rich.console import Console
from rich.progress import track

from lowpeak.data.chat import (
    TEMPLATE_ERRORS,
    Messages,
    begun_text,
    check_messages,
    encode_chat,
    encode_chats,
    prompt_options,
    template_options,
)
from lowpeak.errors import ArgumentError, DataError, ModelError, first_line
from lowpeak.records import Prompt

logger = logging.getLogger(__name__)

Overlong = Literal["error", "drop"]
Item_co = TypeVar("Item_co", covariant=True)

# Keywords that a reward is called with besides the columns; a column of such a name would hide one of them.
REWARD_KEYWORDS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
VISION_COLUMNS = frozenset({"image", "images"})

_BATCH = 1000
_SHOW_PROGRESS_FROM = 20_000


class RowReader(ABC, Generic[Item_co]):
    """Turns rows into what a step uses. None leaves a row out.

    `left_out` completes the sentence "3 of 10 rows are left out: ...". `chat_template_kwargs` are the template's arguments, before
    which a row's own go. `num_embeddings` is how many tokens the model knows (None: not checked). Raises DataError, naming the
    row, on a row that cannot be used.
    """

    left_out: str

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        num_embeddings: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template_defaults = dict(chat_template_kwargs or {})
        self._num_embeddings = num_embeddings

    @abstractmethod
    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Item_co | None:
        """Read one row; `index` is its place in the data set, for errors (None: the same as `serial`)."""

    def read_batch(self, rows: Sequence[Mapping[str, Any]], first: int) -> Sequence[Item_co | None]:
        """Read consecutive rows, of which the first has the index and the serial `first`."""
        return [self.read(row, i) for i, row in enumerate(rows, first)]

    def _chat(
        self, row: Mapping[str, Any], turns: Sequence[Any], where: str, part: str
    ) -> tuple[Messages, dict[str, Any]]:
        """Return a row's messages, checked, and the template's options for them."""
        messages = check_messages(turns, f"{where}: {part}")
        options = template_options(row, self._template_defaults, where)
        if getattr(self._tokenizer, "chat_template", None) is None and options.get("chat_template") is None:
            raise DataError(
                f"{where}: {part} is a list of messages, but the tokenizer has no chat template; set tokenizer.chat_template, "
                "take the tokenizer of an instruct model, or write the prompts as strings."
            )
        return messages, options

    def _check_ids(self, ids: Sequence[int], where: str) -> None:
        """Check that each token has an embedding: a tokenizer that is not the model's crashes the device else."""
        if ids and min(ids) < 0:
            raise DataError(f"{where} has the token {min(ids)}; tokens are whole numbers of 0 or more.")
        if self._num_embeddings is not None and ids and max(ids) >= self._num_embeddings:
            raise DataError(
                f"{where} has the token {max(ids)}, and the model embeds {self._num_embeddings} tokens: use the model's own "
                "tokenizer, or call model.resize_token_embeddings(len(tokenizer))."
            )


class PromptReader(RowReader[Prompt]):
    """Reads rows as prompts. One reader per data set: it remembers the format of its first row.

    Strings are tokenized with the tokenizer's special tokens (a BOS where it adds one) and messages as the chat
    template writes them, both as in TRL. `max_prompt_tokens` None means no limit; `limit_reason` says in errors where
    the limit comes from. With `overlong` "drop" a prompt that is too long is left out.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_tokens: int | None = None,
        overlong: Overlong = "error",
        limit_reason: str = "the limit",
        **settings: Any,
    ) -> None:
        super().__init__(tokenizer, **settings)
        self.left_out = f"the prompt has more than {max_prompt_tokens} tokens"
        self._max_tokens = max_prompt_tokens
        self._overlong = overlong
        self._limit_reason = limit_reason
        self._conversational: bool | None = None

    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Prompt | None:
        return self._read([row], serial, serial if index is None else index)[0]

    def read_batch(self, rows: Sequence[Mapping[str, Any]], first: int) -> list[Prompt | None]:
        return self._read(rows, first, first)

    def _read(self, rows: Sequence[Mapping[str, Any]], serial: int, index: int) -> list[Prompt | None]:
        """Return consecutive rows as prompts; checks them all before it tokenizes any."""
        where = [f"row {i}" for i in range(index, index + len(rows))]
        for row, each in zip(rows, where, strict=True):
            check_prompt_columns(row, each)
            self._check_format(row["prompt"], each)
        options: list[dict[str, Any]] = [{}] * len(rows)
        if self._conversational:
            chats = [self._chat(row, row["prompt"], each, "the prompt") for row, each in zip(rows, where, strict=True)]
            options = [own for _, own in chats]
            encoded = self._encode_chats(chats, where)
        else:
            encoded = self._tokenizer([row["prompt"] for row in rows])["input_ids"]
        serials = range(serial, serial + len(rows))
        return [self._prompt(*each) for each in zip(rows, encoded, options, serials, where, strict=True)]

    def _check_format(self, prompt: Any, where: str) -> None:
        if prompt is None or prompt == "":
            raise DataError(f"{where} has an empty prompt; remove the row or fill it in.")
        if not isinstance(prompt, str | list):
            raise DataError(
                f"{where} has a prompt of type {type(prompt).__name__}; it must be a string or a list of messages."
            )
        conversational = isinstance(prompt, list)
        if self._conversational is None:
            self._conversational = conversational
        if conversational != self._conversational:
            kinds = ("a list of messages", "a string") if conversational else ("a string", "a list of messages")
            raise DataError(f"{where} has {kinds[0]} as its prompt, earlier rows have {kinds[1]}; use one format.")

    def _encode_chats(self, chats: Sequence[tuple[Messages, dict[str, Any]]], where: Sequence[str]) -> list[list[int]]:
        """Return token ids; consecutive rows whose template has the same arguments share one call."""
        asked = [(messages, prompt_options(messages, options)) for messages, options in chats]
        encoded: list[list[int]] = []
        for options, run in groupby(asked, key=lambda chat: chat[1]):
            conversations = [messages for messages, _ in run]
            try:
                encoded += encode_chats(self._tokenizer, conversations, options)
            except TEMPLATE_ERRORS:  # one by one, so that the error names its row
                for messages in conversations:
                    encoded.append(
                        encode_chat(self._tokenizer, messages, options, f"{where[len(encoded)]}: the prompt")
                    )
        return encoded

    def _prompt(
        self, row: Mapping[str, Any], ids: list[int], options: Mapping[str, Any], serial: int, where: str
    ) -> Prompt | None:
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of the prompt {row['prompt']!r:.80}; change it.")
        self._check_ids(ids, where)
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            if self._overlong == "drop":
                return None
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens; {self._limit_reason} leaves {self._max_tokens}; "
                "shorten it or set overlong_prompts='drop'."
            )
        columns = {name: value for name, value in row.items() if name != "prompt"}
        return Prompt(serial, tuple(ids), row["prompt"], columns, begun_text(row["prompt"], options))


def check_embedded(tokenizer: Any, num_embeddings: int | None) -> None:
    """Raise ModelError where the model does not embed the tokens that end and fill rows."""
    for name in ("pad_token", "eos_token"):
        token_id = getattr(tokenizer, f"{name}_id")
        if num_embeddings is not None and token_id is not None and token_id >= num_embeddings:
            raise ModelError(
                f"the tokenizer's {name} {getattr(tokenizer, name)!r} is token {token_id}, and the model embeds {num_embeddings} "
                f"tokens: use the model's own tokenizer with its tokenizer_config.json, or set another {name}."
            )


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many tokens, or characters, both begin with."""
    parts = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(parts, min(len(one), len(other)))


def check_prompt_columns(row: Any, where: str) -> None:
    """Raise DataError unless the row has a `prompt`, and no column that a reward or lowpeak could not take."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where} is a {type(row).__name__}; a row is a mapping of columns (set the data set's format to None)."
        )
    if "prompt" not in row:
        raise DataError(f"{where} has no 'prompt' column, only {_names(row)}; rename the one that holds the prompt.")
    if taken := REWARD_KEYWORDS & row.keys():
        raise DataError(f"{where}: the columns {_names(taken)} are keywords of every reward; rename them.")
    if seen := VISION_COLUMNS & row.keys():
        raise DataError(f"{where}: the columns {_names(seen)} hold images; lowpeak trains on text only, remove them.")


def _names(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in sorted(names, key=str)) or "none"


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ModelError where a tokenizer cannot be used: none at all, one of images, or nothing to pad with."""
    if not hasattr(tokenizer, "eos_token_id") and not hasattr(tokenizer, "image_processor"):
        raise ModelError(
            f"processing_class is {tokenizer!r:.80}, a {type(tokenizer).__name__}; pass a tokenizer, as "
            "AutoTokenizer.from_pretrained returns it."
        )
    if hasattr(tokenizer, "image_processor"):
        raise ModelError("processing_class is an image processor; pass its .tokenizer: lowpeak trains on text only.")
    padding_id(tokenizer)


def padding_id(tokenizer: Any) -> int:
    """Return the token that fills micro-batches on the right: the pad token, else the end-of-sequence token.

    Nothing ever reads what stands there, so a tokenizer without a pad token is left as it is.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ModelError("The tokenizer has neither a pad nor an eos token; set tokenizer.eos_token (or pad_token).")


def num_rows(dataset: Dataset | IterableDataset, name: str = "The data set") -> int | None:
    """Return the rows of a data set with random access; None for a stream. An empty one, or several in one, is a DataError."""
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        raise DataError(f"{name} has the splits {_names(dataset)}; pass one of them, as in dataset['train'].")
    ways = (
        (isinstance(dataset, str | os.PathLike), "load_dataset('json', data_files=..., split='train')"),
        (isinstance(dataset, Mapping), "Dataset.from_dict(...)"),
        (hasattr(dataset, "iloc"), "Dataset.from_pandas(...)"),
    )
    for (
        found,
        way,
    ) in ways:  # a path, a mapping of columns, a table of pandas: what looks like a data set and has no rows
        if found:
            raise DataError(f"The data set is a {type(dataset).__name__}; make it one with datasets.{way}.")
    if not hasattr(dataset, "__len__"):
        return None
    if len(dataset) == 0:
        raise DataError(f"{name} is empty; check its file, its split or the filter that made it.")
    return len(dataset)


def read_rows(dataset: Dataset | IterableDataset, reader: RowReader[Item_co]) -> Iterator[tuple[int, Item_co | None]]:
    """Yield every row's index with what the reader makes of it, once through, a thousand rows in memory."""
    first = 0
    for rows in _batches(dataset):
        yield from enumerate(reader.read_batch(rows, first), first)
        first += len(rows)
    if first == 0:
        raise DataError("The data set is empty: its stream ended before the first row; check where it comes from.")


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
        yield rows_at(dataset, list(range(start, min(start + _BATCH, size))))


def rows_at(dataset: Any, indices: list[int]) -> list[Mapping[str, Any]]:
    """Return rows of a data set with random access; DataError where they cannot be read."""
    many = getattr(dataset, "__getitems__", None)  # one look-up for all, where the data set knows how
    try:
        return many(indices) if many else [dataset[i] for i in indices]
    except Exception as error:  # Arrow's about a damaged file, or a transform's
        raise DataError(
            f"Rows {indices[0]} to {indices[-1]} of the data set cannot be read ({type(error).__name__}: {first_line(error)}): "
            "check its files and its transform."
        ) from error


def usable_rows(dataset: Dataset, reader: RowReader[Any]) -> Any:
    """Return the data set without the rows that are left out; a list of rows is a data set too.

    Raises DataError on the first row that cannot be used, on an empty data set, and if no row stays. Logs once how many are
    left out.
    """
    kept = [index for index, item in read_rows(dataset, reader) if item is not None]
    log_left_out(len(dataset) - len(kept), len(dataset), reader)
    if len(kept) == len(dataset):
        return dataset
    return dataset.select(kept) if hasattr(dataset, "select") else [dataset[i] for i in kept]


def read_all(dataset: Dataset | IterableDataset, reader: RowReader[Item_co]) -> tuple[list[Item_co], int]:
    """Return what the reader makes of the rows that stay, and how many rows there are; logs how many are left out."""
    items = [item for _, item in read_rows(dataset, reader)]
    kept = [item for item in items if item is not None]
    log_left_out(len(items) - len(kept), len(items), reader)
    return kept, len(items)


def check_end(dataset: Any, max_steps: int) -> None:
    """ArgumentError where a stream would train without end."""
    if dataset is not None and num_rows(dataset) is None and max_steps <= 0:
        raise ArgumentError("the data set has no length, so the run needs an end: set max_steps.")


def log_left_out(num_left_out: int, num_rows: int, reader: RowReader[Any]) -> None:
    """Say how many rows are left out and why; that none stays is a DataError."""
    if num_left_out == num_rows:
        raise DataError(f"All {num_rows} rows are left out: {reader.left_out}; change the rows or the settings.")
    if num_left_out:
        logger.warning("%d of %d rows are left out: %s.", num_left_out, num_rows, reader.left_out)
