"""Rows of preferences, as the pairs of records that the rest of the straight line works with.

    columns                      values
    prompt + chosen + rejected   three strings, or three lists of messages: an answer follows the prompt
    chosen + rejected            two strings, or two conversations, each whole
    chosen_ids + rejected_ids    token ids of both, whole
    margin                       optional: by how much the chosen one's score should exceed the other's

A row is tokenized as `rewards.model.ModelReward` reads it, so that a model is trained on what it will be asked: text without
special tokens and without an end-of-sequence token (TRL's trainer adds both, its rewards do not), messages through the chat
template.

A record has one token more than its row, the *slot* of what would come next. It alone counts, so the score is read where it would
be predicted: at the row's last token. Nothing sees a slot; a forest does not even lay it. Padding tokens that end a row are left
away, because a classifier looks for the last token before them. What both rows of a pair begin with is their prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lowpeak.data.chat import encode_chat
from lowpeak.data.prompts import RowReader, num_shared, padding_id, read_all
from lowpeak.errors import DataError
from lowpeak.records import Completion, Record

Pair = tuple[Record, Record]  # the chosen row and the rejected one

_SIDES = ("chosen", "rejected")


def check_preference_columns(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row without two answers."""
    if not any(all(f"{side}{ids}" in row for side in _SIDES) for ids in ("", "_ids")):
        raise DataError(
            f"{where} has the columns {', '.join(map(repr, row))}; a reward model is trained on 'chosen' and 'rejected', "
            "with or without 'prompt': rename them."
        )


class PreferenceReader(RowReader[Pair]):
    """Reads rows as pairs of records of one group; each counts one token, its slot.

    Advantages are +1 at the chosen record's slot and -1 at the rejected one's, returns the margin and 0 (see
    `algorithms.reward_model`). A pair of which one row has more than `max_length` tokens, or whose rows are the same, is left out.
    """

    def __init__(self, tokenizer: Any, *, max_length: int | None = None, **settings: Any) -> None:
        super().__init__(tokenizer, **settings)
        same = "chosen and rejected are the same"
        self.left_out = same if max_length is None else f"one of the two has more than {max_length} tokens, or {same}"
        self.max_length = max_length
        self._padding = padding_id(tokenizer)

    def read(self, row: Mapping[str, Any], serial: int, index: int | None = None) -> Pair | None:
        where = f"row {serial if index is None else index}"
        check_preference_columns(row, where)
        tokenized = all(f"{side}_ids" in row for side in _SIDES)
        both = [list(row[f"{side}_ids"]) if tokenized else self._encode(row, side, where) for side in _SIDES]
        chosen, rejected = (self._checked(ids, where, side) for ids, side in zip(both, _SIDES, strict=True))
        margin = _margin(row, where)
        longest = max(len(chosen), len(rejected))
        if chosen == rejected or (self.max_length is not None and longest > self.max_length):
            return None
        return make_pair(serial, chosen, rejected, margin, self._padding)

    def _encode(self, row: Mapping[str, Any], side: str, where: str) -> list[int]:
        """Return the token ids of the prompt, if there is one, and the answer."""
        prompt, answer = row.get("prompt"), row[side]
        if isinstance(answer, str) and isinstance(prompt, str | None):
            return self._tokenizer((prompt or "") + answer, add_special_tokens=False)["input_ids"]
        if isinstance(answer, list) and isinstance(prompt, list | None):
            turns = [*(prompt or []), *answer]
            return encode_chat(self._tokenizer, *self._chat(row, turns, where, repr(side)), f"{where}: {side!r}")
        kinds = f"{side!r} of type {type(answer).__name__}"
        beside = "" if prompt is None else f" and a prompt of type {type(prompt).__name__}"
        raise DataError(f"{where} has {kinds}{beside}; give strings, or lists of messages.")

    def _checked(self, ids: list[int], where: str, side: str) -> list[int]:
        """Return the ids up to the last that is no padding."""
        self._check_ids(ids, where)
        while ids and ids[-1] == self._padding:
            ids = ids[:-1]
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of {side!r}; remove the row or fill it in.")
        return ids


def make_pair(group: int, chosen: list[int], rejected: list[int], margin: float, slot: int) -> Pair:
    """Return two tokenized rows as records; their prompt is what both begin with, at least the first token of each."""
    start = max(1, num_shared(chosen, rejected))
    return _record(group, chosen, start, slot, 1.0, margin), _record(group, rejected, start, slot, -1.0, 0.0)


def _record(group: int, ids: list[int], start: int, slot: int, advantage: float, gain: float) -> Record:
    own = torch.tensor([*ids[start:], slot], dtype=torch.int32)
    at_slot = torch.zeros(len(own))
    at_slot[-1] = 1.0
    completion = Completion(own, torch.zeros(len(own)), at_slot.bool(), finish_reason="stop")
    return Record(
        group,
        tuple(ids[:start]),
        completion,
        rewards=(),
        reward=0.0,
        advantages=advantage * at_slot,
        returns=gain * at_slot,
    )


def _margin(row: Mapping[str, Any], where: str) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    most = torch.finfo(torch.float32).max
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= most:
        raise DataError(f"{where} has the margin {margin!r:.40}; it must be a finite number, or be left out.")
    return float(margin)


def read_pairs(dataset: Any, reader: PreferenceReader) -> list[Record]:
    """Return the records of all pairs of a data set, their groups counted from 0; logs how many are left out."""
    return flat(read_all(dataset, reader)[0])


def flat(pairs: Iterable[Pair]) -> list[Record]:
    """Return the records of pairs, one after another."""
    return [record for pair in pairs for record in pair]
