"""The growing cache holds what transformers' concatenating cache holds."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from lowpeak.rollout.native import cache as module
from lowpeak.rollout.native.cache import SlotCache


def _states(num_rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Keys and values of unlike width, as models with latent attention have them.
    return (
        torch.randn(num_rows, 2, length, 4, generator=generator),
        torch.randn(num_rows, 2, length, 3, generator=generator),
    )


def _prefilled(num_rows: int, length: int) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        cache.update(*_states(num_rows, length, layer), layer)
    return cache


def _arranged(*shape: int) -> SlotCache:
    cache = SlotCache()
    cache.arrange(torch.tensor([], dtype=torch.int64), *shape)
    return cache


def _filled() -> tuple[SlotCache, DynamicCache]:
    """A cache of 5 rows of 2 prompts, and the same by transformers' own means."""
    ours, theirs = _arranged(5, 6, 6 + 200), _prefilled(2, 6)
    rows = torch.tensor([0, 0, 0, 1, 1])
    ours.place(theirs, slice(0, 5), rows)
    theirs.batch_select_indices(rows)
    return ours, theirs


def test_tokens_are_added_behind_the_prompts_through_several_growths():
    ours, theirs = _filled()
    for step in range(2 * module.ROOM + 5):
        for layer in range(2):
            states = _states(5, 1, 100 + step)
            for mine, other in zip(ours.update(*states, layer), theirs.update(*states, layer), strict=True):
                assert torch.equal(mine, other)
    assert ours.get_seq_length() == theirs.get_seq_length()


def test_compacting_keeps_the_chosen_rows():
    ours, theirs = _filled()
    kept = torch.tensor([1, 4])
    ours.arrange(kept, 2, 6, 206)
    theirs.batch_select_indices(kept)
    states = _states(2, 1, 7)
    for mine, other in zip(ours.update(*states, 1), theirs.update(*states, 1), strict=True):
        assert torch.equal(mine, other)


def test_rows_enter_behind_those_that_stay_and_columns_that_nobody_needs_are_dropped():
    ours, theirs = _filled()
    kept, entered = torch.tensor([1, 4]), _prefilled(1, 3)
    ours.arrange(kept, 4, 5, 20)
    ours.place(entered, slice(2, 4), torch.tensor([0, 0]))
    keys, values = ours.layers[0].keys, ours.layers[0].values
    assert torch.equal(keys[:2], theirs.layers[0].keys[kept, :, 1:])
    assert torch.equal(values[:2], theirs.layers[0].values[kept, :, 1:])
    assert torch.equal(keys[3, :, 2:], entered.layers[0].keys[0])
    assert not keys[2:, :, :2].any()


def test_a_shorter_prefill_is_placed_to_the_right_with_zeros_before_it():
    cache = _arranged(3, 6, 10)
    long, short = _prefilled(1, 6), _prefilled(2, 4)
    cache.place(long, slice(0, 1), torch.tensor([0]))
    cache.place(short, slice(1, 3), torch.tensor([0, 1]))
    keys = cache.layers[0].keys
    assert torch.equal(keys[1:, :, 2:], short.layers[0].keys)
    assert not keys[1:, :, :2].any()
    assert torch.equal(keys[:1], long.layers[0].keys)


@pytest.mark.parametrize("num_new", [1, 7, 90])
def test_buffers_never_hold_more_tokens_than_prompt_and_completion(num_new):
    cache = _arranged(2, 6, 6 + num_new)
    cache.place(_prefilled(2, 6), slice(0, 2), torch.tensor([0, 1]))
    for step in range(num_new):
        cache.update(*_states(2, 1, step), 0)
        keys = cache.layers[0].keys
        stored = keys.untyped_storage().nbytes() // (keys.element_size() * 2 * 2 * 4)
        assert keys.shape[-2] <= stored <= 6 + num_new
