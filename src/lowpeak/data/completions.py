"""Preference data for losses of completions: rows as pairs of records for DPO, as labelled records for KTO.

    columns                            values
    prompt + chosen + rejected         three strings, or three lists of messages
    chosen + rejected                  two strings, or two conversations: the prompt is their common beginning
    prompt_ids, chosen_ids, ...        token ids, completions after the prompt; without prompt_ids complete sequences
    prompt + completion + label        KTO's: a completion, and whether it is desirable

Rows are tokenized as in TRL 1.16: text with the tokenizer's special tokens and one end-of-sequence token, messages by the chat
template. The prompt ends where the tokens of prompt alone and of prompt with each completion differ, after at least one
token. A sequence is truncated at its end to `max_length`; a row whose prompt fills it is dropped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowpeak.data.chat import answer_options, check_messages, encode_chat, prompt_options, with_answer
from lowpeak.data.row_reader import RowReader, common_prefix_length, read_integers
from lowpeak.errors import DataError
from lowpeak.records import Completion, Record

_PAIR = ("chosen", "rejected")
_ROWS_AT_A_TIME = 1000  # those of a batch of datasets' map()


def is_pair(columns: Any) -> bool:
    """Return whether rows with these columns have a chosen and a rejected completion."""
    return any(all(f"{side}{ids}" in columns for side in _PAIR) for ids in ("", "_ids"))


def check_pair_columns(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row without a chosen and a rejected completion."""
    if not is_pair(row):
        raise DataError(
            f"{where} has the columns {', '.join(map(repr, row))}, but DPO needs 'chosen' and 'rejected', with or without "
            "'prompt': rename the columns."
        )


def check_label_columns(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row that is neither a labelled completion nor a pair."""
    if not is_pair(row) and not (
        any({f"prompt{ids}", f"completion{ids}", "label"} <= row.keys() for ids in ("", "_ids"))
    ):
        raise DataError(
            f"{where} has the columns {', '.join(map(repr, row))}, but KTO needs 'prompt', 'completion' and 'label', or "
            "'chosen' and 'rejected': rename the columns."
        )


def _check_unpaired(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a pair, which only a dataset with `map`, or a list, is unpaired from."""
    if is_pair(row) and not any(f"completion{ids}" in row for ids in ("", "_ids")):
        raise DataError(
            f"{where} is a pair, which KTO reads as two labelled rows: pass pairs as a datasets.Dataset, an IterableDataset, or "
            "a list of rows that all have 'chosen' and 'rejected'."
        )


def unpair(dataset: Any) -> Any:
    """Return pairs as labelled completions, as TRL does: of each thousand rows all chosen ones, then all rejected ones."""
    if isinstance(dataset, list | tuple):
        return _unpair_rows(dataset)
    if not hasattr(dataset, "map") or not is_pair(dataset.column_names or next(iter(dataset))):
        return dataset
    return dataset.map(_unpair_batch, batched=True, remove_columns=dataset.column_names)


def _unpair_rows(rows: Sequence[Any]) -> Sequence[Any]:
    if not rows or not all(isinstance(row, Mapping) and is_pair(row) for row in rows):
        return rows
    rows = [_with_prompt(dict(row)) for row in rows]
    thousands = (rows[i : i + _ROWS_AT_A_TIME] for i in range(0, len(rows), _ROWS_AT_A_TIME))
    return [_labelled(row, side) for some in thousands for side in _PAIR for row in some]


def _unpair_batch(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [_with_prompt(dict(zip(batch, row, strict=True))) for row in zip(*batch.values(), strict=True)]
    unpaired = [_labelled(row, side) for side in _PAIR for row in rows]
    return {name: [row[name] for row in unpaired] for name in unpaired[0]}


def _labelled(row: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Return one completion of a pair, with its label."""
    ids = "_ids" if _is_tokenized(row, _PAIR) else ""
    rest = {name: value for name, value in row.items() if name.removesuffix(ids) not in _PAIR}
    return {**rest, f"completion{ids}": row[f"{side}{ids}"], "label": side == "chosen"}


def _is_tokenized(row: Mapping[str, Any], sides: Sequence[str]) -> bool:
    return all(f"{side}_ids" in row for side in sides)


def _with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Return a pair with its prompt: the common beginning of both, without a space before the first difference."""
    if _is_tokenized(row, _PAIR):
        sides, prompt = [f"{side}_ids" for side in _PAIR], "prompt_ids"
        row = {**row, **{side: read_integers(row, side, "a row") for side in sides}}
    else:
        sides, prompt = list(_PAIR), "prompt"
    chosen, rejected = (row[side] for side in sides)
    if row.get(prompt) is not None or not all(isinstance(each, str | list) for each in (chosen, rejected)):
        return {prompt: None, **row}  # the reader refuses what is neither text nor a list
    length = _before_space(chosen, rejected, _implicit_prompt(chosen, rejected))
    return {**row, prompt: chosen[:length], **{side: row[side][length:] for side in sides}}


def _before_space(chosen: Sequence[Any], rejected: Sequence[Any], length: int) -> int:
    """Return the length of a text's beginning without a space before the first difference."""
    is_space = isinstance(chosen, str) and chosen[length - 1 : length] == " "
    return length - 1 if is_space and chosen[length] != rejected[length] else length


def _implicit_prompt(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return the length of the common beginning that leaves something of both."""
    return max(0, min(common_prefix_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1))


class CompletionReader(RowReader[tuple[Record, ...]]):
    """The base of readers whose rows are one prompt with completions, the columns `sides`.

    `tail_weight` weighs tokens beyond the length of the row's shortest completion.
    """

    sides: tuple[str, ...]

    def __init__(
        self, tokenizer: Any, *, max_length: int | None = None, tail_weight: float = 1.0, **settings: Any
    ) -> None:
        super().__init__(tokenizer, **settings)
        self.drop_reason = "a completion has no token" + (
            "" if max_length is None else f" among the first {max_length} of its row"
        )
        self.max_length = max_length
        self.prepared_columns = ("prompt_ids", *(f"{side}_ids" for side in self.sides))
        self._tail_weight = tail_weight

    def is_desirable(self, side: str, row: Mapping[str, Any], where: str) -> bool:
        raise AssertionError("a subclass labels its completions")

    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> tuple[Record, ...] | None:
        where = f"row {serial if index is None else index}"
        prompt_ids, *completions = self.prepare(row, where).values()
        length = None if self.max_length is None else max(0, self.max_length - len(prompt_ids))
        shortest = min(len(ids[:length]) for ids in completions)
        if not shortest:
            return None
        signs = [1.0 if self.is_desirable(side, row, where) else -1.0 for side in self.sides]
        weights = torch.ones(max(len(ids[:length]) for ids in completions))
        weights[shortest:] = self._tail_weight
        return tuple(
            _record(serial, prompt_ids, ids, length, sign * weights)
            for ids, sign in zip(completions, signs, strict=True)
        )

    def is_truncated(self, item: tuple[Record, ...]) -> bool:
        return any(record.completion.finish_reason == "length" for record in item)

    def prepare(self, row: Mapping[str, Any], where: str = "a row") -> dict[str, list[int]]:
        """Return the token ids of the prompt and of each completion."""
        if _is_tokenized(row, self.sides):
            prompt = [] if row.get("prompt_ids") is None else read_integers(row, "prompt_ids", where)
            sequences = [prompt + read_integers(row, f"{side}_ids", where) for side in self.sides]
            start = len(prompt) or (_implicit_prompt(*sequences) if self.sides == _PAIR else 0)
        else:
            prompt, *sequences = self._encode(row, where)
            start = min(self._completion_start(prompt, ids, where) for ids in sequences)
        for ids in sequences:
            self._check_ids(ids, where)
        start = max(1, start)
        parts = [sequences[0][:start], *(ids[start:] for ids in sequences)]
        return dict(zip(self.prepared_columns, parts, strict=True))

    def _encode(self, row: Mapping[str, Any], where: str) -> list[list[int]]:
        """Return the token ids of the prompt, and those of the prompt with each completion."""
        row = _with_prompt(dict(row)) if self.sides == _PAIR else row
        texts = [row.get(name) for name in ("prompt", *self.sides)]
        kinds = {type(text) for text in texts}
        if kinds == {str}:
            self._report_text(where)
            prompt, *answers = map(str, texts)
            return [self._tokenizer(prompt)["input_ids"], *(self._encode_text(prompt + answer) for answer in answers)]
        if kinds == {list}:
            return self._encode_chats(row, where)
        named = zip(("prompt", *self.sides), texts, strict=True)
        raise DataError(
            f"{where} has {', '.join(f'{name!r} of type {type(text).__name__}' for name, text in named)}; pass strings only, or "
            "lists of messages only."
        )

    def _encode_chats(self, row: Mapping[str, Any], where: str) -> list[list[int]]:
        prompt, options = self._read_chat(row, row["prompt"], where, "the prompt")
        answers = [check_messages(row[side], f"{where}: {side!r}") for side in self.sides]
        opened = encode_chat(self._tokenizer, prompt, prompt_options(prompt, options), where)
        chats, whole = [with_answer(prompt, answer, options) for answer in answers], answer_options(options)
        return [opened, *(encode_chat(self._tokenizer, chat, whole, where) for chat in chats)]


class PairReader(CompletionReader):
    """A reader of rows as pairs of records in one group. Advantages: above 0 for the chosen one, below 0 for the other."""

    sides = _PAIR

    def is_desirable(self, side: str, row: Mapping[str, Any], where: str) -> bool:
        return side == "chosen"

    def prepare(self, row: Mapping[str, Any], where: str = "a row") -> dict[str, list[int]]:
        check_pair_columns(row, where)
        return super().prepare(row, where)


class LabelReader(CompletionReader):
    """A reader of rows as single records, with advantages of 1 for a desirable completion and -1 for another."""

    sides = ("completion",)

    def is_desirable(self, side: str, row: Mapping[str, Any], where: str) -> bool:
        label = row.get("label")
        if label not in (True, False):
            raise DataError(f"{where} has the label {label!r:.40}; it must be true or false.")
        return bool(label)

    def prepare(self, row: Mapping[str, Any], where: str = "a row") -> dict[str, list[int]]:
        check_label_columns(row, where)
        _check_unpaired(row, where)
        return super().prepare(row, where)


@dataclass(frozen=True)
class DatasetCompletions:
    """Completions of a dataset that replace generated ones, for a `share` of prompts.

    `seed` and a prompt's serial number decide which prompts, so all ranks agree. A completion is truncated to `max_tokens`. Its
    log-probs are NaN, since no engine scored its tokens.
    """

    reader: LabelReader
    share: float
    seed: int
    max_tokens: int

    def draw(self, row: Mapping[str, Any], prompt_ids: Sequence[int], serial: int, where: str) -> Completion | None:
        """Return the row's completion, with log-probs of NaN; None if one is to be generated."""
        if row.get("completion") is None:
            raise DataError(
                f"{where} has no 'completion', which a share of {self.share:g} of the prompts needs with lmbda below 1: add the "
                "column, or set lmbda=1."
            )
        messages = row["completion"] if isinstance(row["completion"], list) else []
        if "input_ids" in row or any(message.get("role") != "assistant" for message in messages):
            raise DataError(
                f"{where}: lmbda below 1 takes a 'completion' of text, or of messages of the assistant alone, after a 'prompt': "
                "change the row, or set lmbda=1."
            )
        encoded_prompt_ids, ids = self.reader.prepare({**row, "label": True}, where).values()
        if random.Random(f"{self.seed}/{serial}").random() >= self.share:
            return None
        kept = torch.tensor(ids[: self.max_tokens], dtype=torch.int32)
        return Completion(
            kept,
            torch.full((len(kept),), torch.nan),
            torch.ones(len(kept), dtype=torch.bool),
            "stop" if len(kept) == len(ids) else "length",
            None if encoded_prompt_ids == list(prompt_ids) else tuple(encoded_prompt_ids),
        )


def _record(group: int, prompt_ids: list[int], ids: list[int], length: int | None, weights: torch.Tensor) -> Record:
    kept = ids[:length]
    completion = Completion(
        torch.tensor(kept, dtype=torch.int32),
        torch.zeros(len(kept)),
        torch.ones(len(kept), dtype=torch.bool),
        finish_reason="stop" if len(kept) == len(ids) else "length",
    )
    return Record(group, tuple(prompt_ids), completion, rewards=(), reward=0.0, advantages=weights[: len(kept)])
