"""Preference data: rows as pairs of records, a chosen and a rejected one.

    columns                      values
    prompt + chosen + rejected   three strings, or three lists of messages: both answers follow the prompt
    chosen + rejected            two strings, or two conversations, each complete
    chosen_ids + rejected_ids    token ids of both sequences, each complete
    margin                       optional: by how much the chosen score should exceed the rejected one

A row is tokenized as in `rewards.model.ModelReward`, so that the model is trained on the inputs that it will score: text
without special tokens and without an end-of-sequence token (TRL's trainer adds both, its rewards do not), messages by the chat
template.

A record has one token more than its sequence: the *slot* of the next token. Only the slot counts for the loss, so the score is
read at the position that predicts it, the sequence's last token. No token attends to a slot, and packing with shared prefixes
omits it. Padding at the end is removed, because a classifier looks for the last token before padding. The common prefix of
both sequences is the pair's prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lowpeak.data.chat import encode_chat
from lowpeak.data.row_reader import RowReader, common_prefix_length, padding_id
from lowpeak.errors import DataError
from lowpeak.records import Completion, Record

Pair = tuple[Record, Record]  # the chosen record and the rejected one

_SIDES = ("chosen", "rejected")


def check_preference_columns(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row without a chosen and a rejected answer."""
    if not any(all(f"{side}{ids}" in row for side in _SIDES) for ids in ("", "_ids")):
        raise DataError(
            f"{where} has the columns {', '.join(map(repr, row))}, but a reward model needs 'chosen' and 'rejected', "
            "with or without 'prompt': rename the columns."
        )


class PreferenceReader(RowReader[Pair]):
    """A reader of rows as pairs of records in one group.

    Only each record's slot counts for the loss. At the slots, advantages are +1 for the chosen record and -1 for the rejected
    one; returns are the margin and 0 (see `algorithms.reward_model`). A pair is dropped if a sequence has more than
    `max_length` tokens, or if both are equal.
    """

    prepared_columns = ("chosen_ids", "rejected_ids")

    def __init__(self, tokenizer: Any, *, max_length: int | None = None, **settings: Any) -> None:
        super().__init__(tokenizer, **settings)
        equal = "chosen and rejected are equal"
        self.drop_reason = (
            equal if max_length is None else f"one of the two has more than {max_length} tokens, or {equal}"
        )
        self.max_length = max_length
        self._padding = padding_id(tokenizer)

    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Pair | None:
        where = f"row {serial if index is None else index}"
        chosen, rejected = self.prepare(row, where).values()
        margin = _margin(row, where)
        longest = max(len(chosen), len(rejected))
        if chosen == rejected or (self.max_length is not None and longest > self.max_length):
            return None
        return make_pair(serial, chosen, rejected, margin, self._padding)

    def prepare(self, row: Mapping[str, Any], where: str = "a row") -> dict[str, list[int]]:
        """Return the token ids of both sequences, without padding at the end."""
        check_preference_columns(row, where)
        is_tokenized = all(f"{side}_ids" in row for side in _SIDES)
        sequences = (list(row[f"{side}_ids"]) if is_tokenized else self._encode(row, side, where) for side in _SIDES)
        return {
            f"{side}_ids": self._trim_padding(ids, where, side) for side, ids in zip(_SIDES, sequences, strict=True)
        }

    def _encode(self, row: Mapping[str, Any], side: str, where: str) -> list[int]:
        """Return the token ids of the answer, after the prompt if there is one."""
        prompt, answer = row.get("prompt"), row[side]
        if isinstance(answer, str) and isinstance(prompt, str | None):
            self._report_text(where)
            return self._tokenizer((prompt or "") + answer, add_special_tokens=False)["input_ids"]
        if isinstance(answer, list) and isinstance(prompt, list | None):
            turns = [*(prompt or []), *answer]
            return encode_chat(self._tokenizer, *self._read_chat(row, turns, where, repr(side)), f"{where}: {side!r}")
        answer_type = f"{side!r} of type {type(answer).__name__}"
        prompt_type = "" if prompt is None else f" and a prompt of type {type(prompt).__name__}"
        raise DataError(f"{where} has {answer_type}{prompt_type}; pass strings only, or lists of messages only.")

    def _trim_padding(self, ids: list[int], where: str, side: str) -> list[int]:
        """Return the checked ids without padding at the end."""
        self._check_ids(ids, where)
        while ids and ids[-1] == self._padding:
            ids = ids[:-1]
        if not ids:
            raise DataError(f"{where}: the tokenizer returns no token for {side!r}; remove the row or fill it in.")
        return ids


def make_pair(group: int, chosen: list[int], rejected: list[int], margin: float, slot: int) -> Pair:
    """Return two tokenized sequences as records.

    Their prompt is the common prefix, at least the first token of each.
    """
    start = max(1, common_prefix_length(chosen, rejected))
    return _record(group, chosen, start, slot, 1.0, margin), _record(group, rejected, start, slot, -1.0, 0.0)


def _record(group: int, ids: list[int], start: int, slot: int, advantage: float, margin: float) -> Record:
    completion_ids = torch.tensor([*ids[start:], slot], dtype=torch.int32)
    at_slot = torch.zeros(len(completion_ids))
    at_slot[-1] = 1.0
    completion = Completion(completion_ids, torch.zeros(len(at_slot)), at_slot.bool(), finish_reason="stop")
    return Record(
        group,
        tuple(ids[:start]),
        completion,
        rewards=(),
        reward=0.0,
        advantages=advantage * at_slot,
        returns=margin * at_slot,
    )


def _margin(row: Mapping[str, Any], where: str) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    limit = torch.finfo(torch.float32).max
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= limit:
        raise DataError(
            f"{where}: the margin must be a finite number, got {margin!r:.40}; correct it or remove the column."
        )
    return float(margin)


def flatten_pairs(pairs: Iterable[Pair]) -> list[Record]:
    """Return the records of pairs in one list, chosen before rejected."""
    return [record for pair in pairs for record in pair]
