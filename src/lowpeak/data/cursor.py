"""Where a run stands in its data: prompts on demand, over any number of epochs, resumed to the very next one.

The cursor belongs to lowpeak and not to a data loader, because a rollout asks for as many prompts as it needs: it may
straddle epochs, and dynamic sampling asks again. Every rank draws the same prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
from datasets import Dataset, IterableDataset

from lowpeak.data.digest import digest_rows
from lowpeak.data.prompts import PromptReader, RowReader, log_left_out, num_rows, read_all, usable_rows
from lowpeak.errors import CheckpointError, DataError
from lowpeak.records import Prompt

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class PromptCursor(Generic[Item]):
    """Draws what `reader` makes of a data set's rows, epoch after epoch; with a PromptReader, prompts.

    With random access and `shuffle`, each epoch is a permutation given by (seed, epoch) alone. A stream comes in its
    own order, through its shuffle buffer with `shuffle`, and is told the epoch by `set_epoch`. `serial` numbers count
    what was drawn over the whole run.

    A stream is resumed by reading past the rows that were used. The state that `datasets` keeps of its streams would be
    faster, but loses what is in a shuffle buffer or a batched map, so that the run would go on with other prompts.
    `digest` tells the data set from others of as many rows (None: of a stream).
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
        self.prompts_per_epoch = num_rows(dataset)
        self.num_dropped = 0
        self._dataset = dataset
        self._reader = reader
        self._shuffle = shuffle
        self._seed = seed
        self._digest = digest
        if self.prompts_per_epoch is None and shuffle:
            if hasattr(dataset, "shuffle"):
                self._dataset = dataset.shuffle(seed=seed)
            else:
                logger.warning("A %s has no shuffle(); its prompts come in its own order.", type(dataset).__name__)
        self._serial = 0
        self._start_epoch(0)

    def take(self, count: int) -> list[Item]:
        """Return the next `count` prompts. Raises DataError on a row that cannot be used, or an epoch that has none at all."""
        items: list[Item] = []
        while len(items) < count:
            index, row = self._next_row()
            item = self._reader.read(row, self._serial, index)
            if item is None:
                self.num_dropped += 1
            else:
                self._serial += 1
                items.append(item)
        return items

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers from which the same data set goes on with the very next prompt."""
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
        """Go on where `state` was taken; another data set size, seed or order is a CheckpointError.

        Other rows are a warning: a row may have been mended.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise CheckpointError(
                    f"The checkpoint's data position was taken with {name}={state[name]}, this run has {name}={value}; "
                    "resume with the same data set and settings, or start a new run from the saved model."
                )
        saved = state.get("digest")  # former versions saved none
        if saved is not None and saved != self._digest:
            logger.warning(
                "train_dataset has other rows than the checkpoint's, though as many (digest %s, which was %s): the run goes on at "
                "the same position in them. If that is not meant, resume with the same data set.",
                self._digest,
                saved,
            )
        self._serial = state["serial"]
        self.num_dropped = state["num_dropped"]
        self._start_epoch(state["epoch"], state["position"])
        self._epoch_serial = state["epoch_serial"]

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self.prompts_per_epoch, "shuffle": self._shuffle, "seed": self._seed}

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self._epoch = epoch
        self._position = position
        self._epoch_serial = self._serial
        self._rows = self._walk(epoch, position)

    def _next_row(self) -> tuple[int, Mapping[str, Any]]:
        while (indexed_row := next(self._rows, None)) is None:
            self._check_epoch()
            self._start_epoch(self._epoch + 1)
        self._position += 1
        return indexed_row

    def _walk(self, epoch: int, position: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the epoch's rows from `position` on, each with its index. Nothing is read before the first is asked for."""
        if self.prompts_per_epoch is not None:
            order = permutation(self.prompts_per_epoch, self._seed, epoch) if self._shuffle else None
            for i in range(position, self.prompts_per_epoch):
                index = i if order is None else int(order[i])
                yield index, self._dataset[index]
            return
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        yield from enumerate(islice(iter(self._dataset), position, None), position)

    def _check_epoch(self) -> None:
        if self._position == 0:
            raise DataError("The data set is empty: its stream ended before the first row; check where it comes from.")
        if self._serial == self._epoch_serial:
            log_left_out(self._position, self._position, self._reader)


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch: [size] int64, the same on every machine and with every NumPy.

    The order in which `size` raw 64-bit numbers of Philox(key=(seed, epoch)) sort. NumPy promises the raw stream of a
    bit generator to stay, and no such thing of `Generator.permutation` (NEP 19).
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def eval_prompts(dataset: Dataset | IterableDataset, reader: PromptReader) -> list[Prompt]:
    """Return all prompts of an evaluation set in order, with serials from 0; logs how many are left out."""
    return [replace(prompt, serial=i) for i, prompt in enumerate(read_all(dataset, reader)[0])]


def cursor_over(dataset: Any, reader: RowReader[Item], args: Any) -> PromptCursor[Item]:
    """Return a run's cursor over the rows that can be used: all of a data set are read first, those of a stream as they come."""
    is_stream = num_rows(dataset) is None
    return PromptCursor(
        dataset if is_stream else usable_rows(dataset, reader),
        reader,
        shuffle=args.shuffle_dataset,
        seed=args.seed if args.data_seed is None else args.data_seed,
        digest=None if is_stream else digest_rows(dataset),
    )
