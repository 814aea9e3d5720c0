"""Which tokens of several rows count, found at once."""

from __future__ import annotations

import torch

from lowpeak.batching.counted import CountedTokens
from lowpeak.records import Completion, Record


def record(*mask: bool) -> Record:
    ids = torch.arange(len(mask), dtype=torch.int32)
    return Record(0, (7,), Completion(ids, ids.float(), torch.tensor(mask, dtype=torch.bool), "stop"), (1.0,), 1.0)


def test_counted_tokens_know_their_row_their_place_and_their_column():
    counted = CountedTokens.of([record(True, False, True), record(False, False), record(False, True, False)])
    assert counted.rows_T.tolist() == [0, 0, 2]
    assert counted.places_T.tolist() == [0, 2, 6]
    assert counted.columns_T.tolist() == [0, 2, 1]
    assert counted.counts() == [2, 0, 1]


def test_a_forest_needs_what_comes_before_the_last_counted_token():
    counted = CountedTokens.of([record(True, False, True, False), record(True), record(False, False)])
    assert counted.needed() == [2, 0, 0]


def test_no_rows_have_no_counted_tokens():
    counted = CountedTokens.of([])
    assert counted.counts() == counted.needed() == counted.rows_T.tolist() == []
