"""The prefill of several prompts equals a forward of each alone, also in the slots that it is copied to."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from lowpeak.rollout.native.cache import SlotCache
from lowpeak.rollout.native.prefill import left_padded, prefill, share
from tiny import tiny_model

PROMPTS = [(2, 3, 4, 5, 6, 7, 8), (9, 9), (4, 5, 6), (3, 2, 4), (12,)]


@pytest.mark.parametrize(
    ("max_tokens", "parts"),
    [(1, [[0], [2], [3], [1], [4]]), (8, [[0], [2, 3], [1, 4]]), (1000, [[0, 2, 3, 1, 4]])],
)
def test_prompts_share_a_forward_while_its_padded_tokens_allow(max_tokens, parts):
    assert list(share([0, 2, 3, 1, 4], [len(ids) for ids in PROMPTS], max_tokens)) == parts


def test_logits_and_slots_are_those_of_each_prompt_alone():
    model, lengths = tiny_model(), [len(ids) for ids in PROMPTS]
    rows = [0, 0, 1, 2, 2, 2, 3, 4]
    cache = SlotCache(10 * 12, 12)
    with torch.no_grad():
        logits, prefilled = prefill(model, PROMPTS, torch.device("cpu"))
        cache.reserve(10, 7, 0)
        cache.place(prefilled, rows, lengths, 2)
        for prompt, ids in enumerate(PROMPTS):
            alone = DynamicCache()
            expected = model(input_ids=torch.tensor([ids]), past_key_values=alone, use_cache=True).logits[0, -1]
            torch.testing.assert_close(logits[prompt], expected, atol=1e-5, rtol=1e-5)
            for slot in [2 + i for i, row in enumerate(rows) if row == prompt]:
                for mine, other in zip(cache.layers, alone.layers, strict=True):
                    for buffer, states in zip(mine.buffers, (other.keys, other.values), strict=True):
                        placed = buffer[slot, : len(ids)].transpose(0, 1)
                        torch.testing.assert_close(placed, states[0], atol=1e-5, rtol=1e-5)


def test_a_prompt_is_padded_with_its_own_token_so_that_no_penalty_meets_another():
    assert left_padded([(5, 6, 7), (4, 3)], torch.device("cpu")).tolist() == [[5, 6, 7], [4, 4, 3]]
