"""Waves hold every row once, under the budget, long prompts first."""

from __future__ import annotations

import pytest

from lowpeak.errors import EngineError
from lowpeak.rollout.native.slots import Row, form_waves


@pytest.mark.parametrize("max_tokens", [20, 47, 100, 10_000])
@pytest.mark.parametrize("num_generations", [1, 3, 8])
def test_every_row_is_in_one_wave_and_no_wave_exceeds_the_budget(max_tokens, num_generations):
    lengths = [3, 12, 7, 7, 1, 9]
    waves = form_waves(lengths, num_generations, 8, max_tokens)
    rows = [row for wave in waves for row in wave]
    assert sorted(rows) == [Row(i, j) for i in range(6) for j in range(num_generations)]
    for wave in waves:
        assert len(wave) * (max(lengths[row.prompt] for row in wave) + 8) <= max_tokens


def test_groups_stay_whole_where_a_wave_can_hold_one():
    waves = form_waves([4] * 5, 4, 6, 60)
    assert [len(wave) for wave in waves] == [4] * 5
    assert all(len({row.prompt for row in wave}) == 1 for wave in waves)


def test_a_group_larger_than_a_wave_is_cut():
    assert [len(wave) for wave in form_waves([4], 8, 6, 30)] == [3, 3, 2]


def test_prompts_of_like_length_share_a_wave_longest_first():
    waves = form_waves([2, 9, 2, 9], 1, 1, 20)
    assert [[row.prompt for row in wave] for wave in waves] == [[1, 3], [0, 2]]


def test_no_prompt_makes_no_wave():
    assert form_waves([], 4, 6, 60) == []


def test_a_budget_too_small_for_one_row_is_an_error_with_the_numbers():
    with pytest.raises(EngineError, match=r"40 prompt and 10 new tokens does not fit .* 49 tokens"):
        form_waves([40], 2, 10, 49)
