"""The benchmark of Online DPO: both sides get the same pairs, in the shapes that each takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from benchmarks import online_dpo
from benchmarks.harness.pairing import (
    PairRequest,
    canned_batch,
    our_countdowns,
    portions,
    second_is_better,
    settings_of,
)
from benchmarks.harness.shapes import make_tokenizer


def request(library, **changes):
    plan = online_dpo.parse([])
    asked = online_dpo.request_of(plan, library, [list(range(1, 17))], "start", "folder")
    return PairRequest(**{**asked, **changes})


def test_a_step_is_as_many_completions_on_both_sides():
    ours, peer = settings_of(request("lowpeak")), settings_of(request("trl"))
    assert ours["per_device_train_batch_size"] == 2 * peer["per_device_train_batch_size"] == 8
    assert ours["gradient_accumulation_steps"] == peer["gradient_accumulation_steps"] == 2
    assert ours["max_completion_length"] == peer["max_new_tokens"] == 256


def test_the_peer_gets_first_completions_then_second_ones_of_each_portion():
    assert list(portions(request("trl"))) == [[1, 3, 5, 7, 2, 4, 6, 8], [9, 11, 13, 15, 10, 12, 14, 16]]


def test_the_second_completion_is_better_on_both_sides():
    seen = []
    assert second_is_better(True, seen)(["a"] * 4, [[1], [1, 2], [1], [1]]) == [0.0, 1.0, 0.0, 1.0]
    assert second_is_better(False, seen)(["a"] * 4, [[1]] * 4) == [0.0, 0.0, 1.0, 1.0]
    assert seen[0] == [1, 2, 1, 1]


def test_canned_completions_are_the_same_ids():
    trainer = SimpleNamespace(processing_class=make_tokenizer())
    entries = ["w400 <start>", "w400 <start>", "w401 <start>", "w401 <start>"]
    ours = our_countdowns(entries, trainer, [2, 1, 3, 1])
    prompts, _, completions, mask, _ = canned_batch(trainer, ["w400 <start>", "w401 <start>"], [2, 3, 1, 1])
    assert ours["completion_ids"] == [[2, 1], [1], [3, 2, 1], [1]]
    rows = [row[: int(count)] for row, count in zip(completions.tolist(), mask.sum(1), strict=True)]
    assert [rows[0], rows[2], rows[1], rows[3]] == ours["completion_ids"]
    assert [prompts.tolist()[i] for i in (0, 2, 1, 3)] == ours["prompt_ids"]


def test_portions_that_do_not_divide_a_step_are_refused():
    with pytest.raises(SystemExit):
        online_dpo.parse(["--prompts", "8", "--at_once", "3"])
