"""A run's position in its dataset, from which it draws prompts over any number of epochs.

A resumed run continues with the very next prompt. The cursor replaces a data loader, because rollouts draw varying numbers of
prompts: they may span epochs, and dynamic sampling draws more. Every rank draws the same prompts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
from datasets import Dataset, IterableDataset

from lowpeak.data.prompts import PromptReader
from lowpeak.data.row_reader import RowReader, filter_rows, log_dropped_rows, num_rows, read_all
from lowpeak.errors import CheckpointError, DataError
from lowpeak.records import Prompt

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_DIGEST_ROWS = 32  # at most, evenly spaced from the first to the last


class DatasetCursor(Generic[Item]):
    """A cursor that draws a reader's items from a dataset, epoch after epoch.

    With a PromptReader the items are prompts. With random access and `shuffle`, each epoch is a permutation that depends on
    (seed, epoch) alone. A stream keeps its order, or uses its shuffle buffer with `shuffle`; `set_epoch` passes it the epoch.
    `serial` counts the items drawn in the run. `digest` distinguishes the dataset from others with as many rows, a stream
    from those with other columns.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        reader: RowReader[Item],
        *,
        shuffle: bool,
        seed: int,
        digest: str | None = None,
    ) -> None:
        self.rows_per_epoch = num_rows(dataset)
        self.num_dropped = 0
        self._dataset = dataset
        self._reader = reader
        self._shuffle = shuffle
        self._seed = seed
        self._digest = digest
        if self.rows_per_epoch is None and shuffle:
            if hasattr(dataset, "shuffle"):
                self._dataset = dataset.shuffle(seed=seed)
            else:
                logger.warning("A %s has no shuffle(), so its prompts are not shuffled.", type(dataset).__name__)
        self._serial = 0
        self._logged_truncation = False
        self._start_epoch(0)

    def take(self, count: int) -> list[Item]:
        """Return the next `count` items.

        Raises DataError for an invalid row, or if all rows of an epoch are dropped.
        """
        items: list[Item] = []
        while len(items) < count:
            index, row = self._next_row()
            item = self._reader.read(row, self._serial, index)
            if item is None:
                self.num_dropped += 1
            else:
                self._serial += 1
                items.append(item)
                self._log_truncation(index, item)
        return items

    def _log_truncation(self, index: int, item: Item) -> None:
        """Log the first truncated row of a stream; rows with random access are counted before the run."""
        if self.rows_per_epoch is None and not self._logged_truncation and self._reader.is_truncated(item):
            self._logged_truncation = True
            logger.warning(
                "Row %d is longer than %s tokens (max_length, or the model's context if that is less) and is truncated at its end. "
                "Logged once: other rows of the stream may be, too.",
                *(index, self._reader.max_length),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "serial": self._serial,
            "epoch_serial": self._epoch_serial,
            "num_dropped": self.num_dropped,
            "digest": self._digest,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position `state`; CheckpointError if the dataset's size, the seed or the order differ.

        Different rows of the same number are compared by `check_run_identity`: the user may have corrected a row.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise CheckpointError(
                    f"The checkpoint's position in the dataset was saved with {name}={state[name]}, but this run has "
                    f"{name}={value}; resume with the same dataset and settings, or start a new run from the saved model."
                )
        self._serial = state["serial"]
        self.num_dropped = state["num_dropped"]
        self._start_epoch(state["epoch"], state["position"])
        self._epoch_serial = state["epoch_serial"]

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self.rows_per_epoch, "shuffle": self._shuffle, "seed": self._seed}

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self._epoch = epoch
        self._position = position
        self._epoch_serial = self._serial
        self._rows = self._iterate_rows(epoch, position)

    def _next_row(self) -> tuple[int, Mapping[str, Any]]:
        while (indexed_row := next(self._rows, None)) is None:
            self._check_epoch()
            self._start_epoch(self._epoch + 1)
        self._position += 1
        return indexed_row

    def _iterate_rows(self, epoch: int, position: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the epoch's rows from `position` on, each with its index."""
        if self.rows_per_epoch is not None:
            order = permutation(self.rows_per_epoch, self._seed, epoch) if self._shuffle else None
            for i in range(position, self.rows_per_epoch):
                index = i if order is None else int(order[i])
                yield index, self._dataset[index]
            return
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        # Resume by reading past the used rows. The state that `datasets` keeps of its streams would be faster, but lacks the
        # contents of a shuffle buffer or a batched map, so the run would continue with other prompts.
        yield from enumerate(islice(iter(self._dataset), position, None), position)

    def _check_epoch(self) -> None:
        if self._position == 0:
            raise DataError("The dataset is empty: its stream ended before the first row; check its source.")
        if self._serial == self._epoch_serial:
            log_dropped_rows(self._position, self._position, self._reader)


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch, [size] int64.

    It is the sort order of `size` raw 64-bit numbers of Philox(key=(seed, epoch)): the same on every machine and with every
    version of NumPy.
    """
    # NumPy guarantees the raw stream of a bit generator, but not `Generator.permutation` (NEP 19).
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def read_eval_prompts(dataset: Dataset | IterableDataset, reader: PromptReader) -> list[Prompt]:
    """Return all prompts of an evaluation set in order, with serials from 0.

    Logs how many rows are dropped.
    """
    return [replace(prompt, serial=i) for i, prompt in enumerate(read_all(dataset, reader))]


def make_cursor(dataset: Any, reader: RowReader[Item], args: Any, shuffle: bool) -> DatasetCursor[Item]:
    """Return a run's cursor over the usable rows of a dataset.

    A dataset with random access is checked completely first, a stream row by row. `args` have transformers' seeds.
    """
    is_stream = num_rows(dataset) is None
    return DatasetCursor(
        dataset if is_stream else filter_rows(dataset, reader),
        reader,
        shuffle=shuffle,
        seed=args.seed if args.data_seed is None else args.data_seed,
        digest=digest_row(dict.fromkeys(getattr(dataset, "column_names", None) or ()))
        if is_stream
        else digest_rows(dataset),
    )


def digest_row(row: Mapping[str, Any]) -> str:
    """Return a digest of a row's values, the same on every machine and in every process.

    Of a value that is not plain (an image), only the type counts.
    """
    text = json.dumps(dict(sorted(row.items())), default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digest_rows(dataset: Any) -> str:
    """Return a digest of the first row, the last, and some in between."""
    last = len(dataset) - 1
    indices = sorted({last * i // (_DIGEST_ROWS - 1) for i in range(_DIGEST_ROWS)})
    return hashlib.sha256(" ".join(digest_row(dataset[i]) for i in indices).encode()).hexdigest()[:12]
