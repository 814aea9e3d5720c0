"""Which rows enter free slots."""

from __future__ import annotations

import pytest

from lowpeak.errors import EngineError
from lowpeak.rollout.native.slots import Waiting
from lowpeak.rollout.native.waves import Row


def test_whole_groups_enter_longest_prompts_first_until_the_slots_are_taken():
    waiting = Waiting([3, 5, 4], num_generations=2, max_new_tokens=5, max_tokens=50)
    assert waiting.enter([]) == [Row(1, 0), Row(1, 1), Row(2, 0), Row(2, 1)]


def test_nothing_enters_while_fewer_than_a_quarter_of_the_slots_are_free():
    waiting = Waiting([5] * 12, num_generations=1, max_new_tokens=5, max_tokens=80)
    assert len(waiting.enter([])) == 8
    assert waiting.enter([0] * 7) == []
    assert waiting.enter([0] * 6) == [Row(8, 0), Row(9, 0)]


def test_a_group_of_more_than_half_of_the_slots_enters_in_parts():
    waiting = Waiting([5, 5], num_generations=3, max_new_tokens=5, max_tokens=40)
    assert waiting.enter([]) == [Row(0, 0), Row(0, 1), Row(0, 2), Row(1, 0)]
    assert waiting.enter([0, 0, 0, 1]) == []
    assert waiting.enter([0, 1]) == [Row(1, 1), Row(1, 2)]


def test_shorter_prompts_have_more_slots():
    waiting = Waiting([15, 5, 5, 5], num_generations=1, max_new_tokens=5, max_tokens=40)
    assert len(waiting.enter([])) == 2
    assert len(waiting.enter([1])) == 2


def test_a_row_that_cannot_fit_is_an_error():
    with pytest.raises(EngineError, match="One row of 9 prompt and 5 new tokens"):
        Waiting([3, 9], num_generations=1, max_new_tokens=5, max_tokens=13)
