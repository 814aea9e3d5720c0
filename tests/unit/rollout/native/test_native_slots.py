"""How many rows there is room for, and which prompts begin."""

from __future__ import annotations

import pytest

from lowpeak.errors import EngineError
from lowpeak.rollout.native.slots import Waiting


def test_the_longest_prompts_begin_first_and_as_few_as_fill_the_slots():
    waiting = Waiting([3, 5, 4, 2], num_generations=2, max_new_tokens=5, max_tokens=50)
    assert waiting.num_slots([]) == 5
    assert waiting.take(3) == [1, 2]
    assert waiting.take(0) == []
    assert waiting.take(-1) == []
    assert waiting.take(100) == [0, 3]
    assert waiting.take(1) == []


def test_shorter_prompts_have_more_slots_once_no_longer_one_runs():
    waiting = Waiting([15, 5, 5, 5], num_generations=1, max_new_tokens=5, max_tokens=40)
    assert waiting.num_slots([]) == 2
    assert waiting.take(2) == [0, 1]
    assert waiting.num_slots([0, 1]) == 2
    assert waiting.num_slots([1]) == 4


def test_a_budget_that_is_counted_anew_has_other_slots():
    waiting = Waiting([5, 5], num_generations=2, max_new_tokens=5, max_tokens=20)
    waiting.set_budget(40)
    assert waiting.num_slots([]) == 4
    with pytest.raises(EngineError, match="kv_cache_bytes"):
        waiting.set_budget(9)


def test_a_row_that_cannot_fit_is_an_error():
    with pytest.raises(EngineError, match="One row of 9 prompt and 5 new tokens"):
        Waiting([3, 9], num_generations=1, max_new_tokens=5, max_tokens=13)
