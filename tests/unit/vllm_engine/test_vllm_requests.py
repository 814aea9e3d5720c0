"""Waves hold every row once, are as few as there can be, and cut a prompt's rows only where that saves a wave."""

from __future__ import annotations

from collections import Counter

import pytest

from fake_vllm import facts
from lowpeak.arguments.vllm import ColocateSettings, ServerSettings
from lowpeak.errors import EngineError
from lowpeak.vllm.protocol import Request
from lowpeak.vllm.requests import CompletionLengths, SequenceRequest, form_waves, split_wave, wave_capacity


def rows(*groups):
    """A row per completion of groups given as (length of the prompt, completions)."""
    return [
        SequenceRequest(serial, number, Request((serial,) * length, {"max_tokens": 3}))
        for serial, (length, count) in enumerate(groups)
        for number in range(count)
    ]


def serials(waves):
    return [sorted(Counter(row.serial for row in wave).items()) for wave in waves]


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 7, 8, 12, 13, 100])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (1, 1, 1, 1, 1), (8,), (2, 5, 3), ()])
def test_every_row_is_in_one_wave_and_there_are_as_few_as_can_be(capacity, sizes):
    sequences = rows(*((2 + i, size) for i, size in enumerate(sizes)))
    waves = form_waves(sequences, capacity)
    assert sorted(row.key for wave in waves for row in wave) == sorted(row.key for row in sequences)
    assert all(0 < len(wave) <= capacity for wave in waves)
    assert len(waves) == -(-len(sequences) // capacity)


def test_groups_stay_whole_where_that_makes_no_more_waves():
    assert serials(form_waves(rows((5, 4), (4, 4), (3, 4), (2, 4)), 9)) == [[(0, 4), (1, 4)], [(2, 4), (3, 4)]]


def test_a_group_is_cut_where_whole_ones_would_take_another_wave():
    waves = form_waves(rows((5, 4), (4, 4), (3, 4)), 6)
    assert [len(wave) for wave in waves] == [6, 6]
    assert serials(waves) == [[(0, 4), (1, 2)], [(1, 2), (2, 4)]]


def test_longest_prompts_come_first_and_waves_are_about_even():
    waves = form_waves(rows(*((length, 1) for length in range(1, 11))), 4)
    assert [len(wave) for wave in waves] == [3, 3, 4]
    lengths = [len(row.request.prompt_ids) for wave in waves for row in wave]
    assert lengths == sorted(lengths, reverse=True)


def requests(prompt=20, limit=80, count=1):
    return [Request((1,) * prompt, {"max_tokens": limit})] * count


def capacity(*engines, callers=1, seen=(), of=()):
    """Return the capacity for requests (of 20 + 80 tokens), after completions of the lengths `seen`, wave by wave."""
    lengths = CompletionLengths()
    for wave in seen:
        lengths.add(wave)
    return wave_capacity(engines, of or requests(), lengths, callers, ColocateSettings())


def test_what_fits_is_bounded_by_cache_and_slots_and_shared_by_callers():
    assert capacity(facts(kv_tokens=1000, max_num_seqs=64)) == 10
    assert capacity(facts(kv_tokens=1000, max_num_seqs=8)) == 8
    assert capacity(facts(kv_tokens=1000), facts(kv_tokens=500)) == 15
    assert capacity(facts(kv_tokens=1000), callers=4) == 2
    assert capacity(facts(kv_tokens=100), callers=4) == 1
    assert capacity(facts(kv_tokens=1000), of=[*requests(), *requests(2, 3, 9)]) == 10


def test_lengths_that_were_seen_let_more_run_at_once_never_fewer_than_full_length():
    one = facts(kv_tokens=1000)
    assert capacity(one, seen=[(10, 10, 40)]) == 20  # 1.25 * (20 + 20) tokens
    assert capacity(facts(kv_tokens=1000, max_num_seqs=16), seen=[(20,)]) == 16
    assert capacity(one, facts(kv_tokens=500), callers=2, seen=[(20,)]) == 15
    assert capacity(one, seen=[(80,)]) == capacity(one, seen=[(1000,)]) == capacity(one)
    assert capacity(one, seen=[(1000,)], of=requests(20, 4, 10)) == 1000 // 24  # beyond the limit of these
    assert capacity(one, seen=[(20,)], of=[*requests(60), *requests(20, count=3)]) == 15  # of these prompts


def test_new_lengths_replace_those_of_256_completions_ago():
    one = facts(kv_tokens=1000)
    assert capacity(one, seen=[(80,), (10,), (10,), (19, 1)]) == 18  # all count: 1.25 * (20 + 24) tokens
    assert capacity(one, seen=[(80,) * 5000, (20,) * 512]) == 13  # the last third of 80
    with pytest.raises(EngineError, match="kv_cache_bytes"):
        capacity(facts(kv_tokens=99), seen=[(1,)])


@pytest.mark.parametrize(
    ("where", "remedy"),
    [
        (ColocateSettings(), r"vllm_gpu_memory_utilization \(now 0\.3\).*kv_cache_bytes"),
        (ServerSettings(("http://a:1",)), "--gpu_memory_utilization"),
    ],
)
def test_a_row_that_fits_no_cache_is_told_with_what_can_be_changed_there(where, remedy):
    with pytest.raises(EngineError, match=f"101 .*{remedy}"):
        wave_capacity([facts(kv_tokens=1000), facts(kv_tokens=100)], requests(21), CompletionLengths(), 1, where)


def test_engines_get_whole_prompts_where_there_are_enough_and_parts_where_not():
    wave = rows((50, 2), (10, 2), (10, 2), (10, 2))
    first, second = split_wave(wave, 2)
    assert sorted(first + second) == list(range(8))
    assert {wave[i].serial for i in first} | {wave[i].serial for i in second} == {0, 1, 2, 3}
    assert not {wave[i].serial for i in first} & {wave[i].serial for i in second}
    assert [len(part) for part in split_wave(rows((4, 6)), 3)] == [2, 2, 2]
    assert split_wave(rows((4, 1)), 3) == [[0], [], []]
