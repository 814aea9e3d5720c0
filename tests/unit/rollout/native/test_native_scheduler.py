"""How many rows there is room for, which prompts begin, and which share a wave."""

from __future__ import annotations

import pytest

from lowpeak.errors import EngineError
from lowpeak.rollout.native.scheduler import PromptQueue, SequenceId, form_waves


def tokens(most):
    return lambda columns: most // columns


def test_the_longest_prompts_begin_first_and_as_few_as_fill_the_slots():
    waiting = PromptQueue([3, 5, 4, 2], num_generations=2, max_new_tokens=5, slots_of=tokens(50))
    assert waiting.num_slots([]) == 5
    assert waiting.take(3) == [1, 2]
    assert waiting.take(0) == []
    assert waiting.take(-1) == []
    assert waiting.take(100) == [0, 3]
    assert waiting.take(1) == []


def test_shorter_prompts_have_more_slots_once_no_longer_one_runs():
    waiting = PromptQueue([15, 5, 5, 5], num_generations=1, max_new_tokens=5, slots_of=tokens(40))
    assert waiting.num_slots([]) == 2
    assert waiting.take(2) == [0, 1]
    assert waiting.num_slots([0, 1]) == 2
    assert waiting.num_slots([1]) == 4


def test_a_budget_that_is_counted_anew_has_other_slots():
    waiting = PromptQueue([5, 5], num_generations=2, max_new_tokens=5, slots_of=tokens(20))
    waiting.limit_slots(tokens(40))
    assert waiting.num_slots([]) == 4
    with pytest.raises(EngineError, match="kv_cache_bytes"):
        waiting.limit_slots(tokens(9))


@pytest.mark.parametrize("max_tokens", [20, 47, 100, 10_000])
@pytest.mark.parametrize("num_generations", [1, 3, 8])
def test_every_row_is_in_one_wave_and_no_wave_exceeds_the_budget(max_tokens, num_generations):
    lengths = [3, 12, 7, 7, 1, 9]
    waves = form_waves(lengths, num_generations, 8, max_tokens)
    rows = [row for wave in waves for row in wave]
    assert sorted(rows) == [SequenceId(i, j) for i in range(6) for j in range(num_generations)]
    for wave in waves:
        assert len(wave) * (max(lengths[row.prompt] for row in wave) + 8) <= max_tokens


@pytest.mark.parametrize(
    ("lengths", "num_generations", "new", "max_tokens", "waves"),
    [([4], 8, 6, 30, [[0] * 3, [0] * 3, [0] * 2]), ([2, 9, 2, 9], 1, 1, 20, [[1, 3], [0, 2]])],
    ids=["a group larger than a wave is cut", "prompts of like length share a wave, longest first"],
)
def test_waves_are_as_large_as_the_budget_allows(lengths, num_generations, new, max_tokens, waves):
    formed = form_waves(lengths, num_generations, new, max_tokens)
    assert [[row.prompt for row in wave] for wave in formed] == waves


def test_with_equal_lengths_no_wave_has_prompts_of_two_lengths():
    waves = form_waves([2, 9, 2, 3], 2, 1, 100, equal_lengths=True)
    assert [[row.prompt for row in wave] for wave in waves] == [[1, 1], [3, 3], [0, 0, 2, 2]]
    assert [len(wave) for wave in form_waves([4, 4], 3, 1, 20, equal_lengths=True)] == [4, 2]


def test_a_row_that_cannot_fit_is_an_error_with_the_numbers():
    with pytest.raises(EngineError, match=r"9 .*5 .*kv_cache_bytes"):
        PromptQueue([3, 9], num_generations=1, max_new_tokens=5, slots_of=tokens(13))
    with pytest.raises(EngineError, match=r"40 .*10 .*49 .*kv_cache_bytes"):
        form_waves([40], 2, 10, 49)
    assert form_waves([], 4, 6, 60) == []
