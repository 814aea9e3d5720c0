"""A wave's prefill equals a forward of each prompt alone, however it is cut."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from lowpeak.rollout.native.cache import SlotCache
from lowpeak.rollout.native.prefill import left_padded, prefill
from lowpeak.rollout.native.waves import form_waves
from tiny import tiny_model

PROMPTS = [(2, 3, 4, 5, 6, 7, 8), (9, 9), (4, 5, 6), (3, 2, 4), (12,)]


@pytest.mark.parametrize(
    ("max_tokens", "forwards"),
    [(1, [(1, 7), (1, 3), (1, 3), (1, 2), (1, 1)]), (8, [(1, 7), (2, 3), (2, 2)]), (1000, [(5, 7)])],
)
def test_logits_and_cache_are_those_of_each_prompt_alone(max_tokens, forwards):
    model = tiny_model()
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    (wave,) = form_waves([len(ids) for ids in PROMPTS], 3, 5, 1000)
    with torch.no_grad():
        cache = SlotCache()
        cache.arrange(torch.tensor([], dtype=torch.int64), len(wave), 7, 12)
        logits = prefill(model, wave, PROMPTS, cache, max_tokens=max_tokens)
        assert shapes == forwards
        for i, row in enumerate(wave):
            alone = DynamicCache()
            ids = torch.tensor([PROMPTS[row.prompt]])
            expected = model(input_ids=ids, past_key_values=alone, use_cache=True).logits[0, -1]
            torch.testing.assert_close(logits[i], expected, atol=1e-5, rtol=1e-5)
            for mine, other in zip(cache.layers, alone.layers, strict=True):
                torch.testing.assert_close(mine.keys[i, :, 7 - ids.shape[1] :], other.keys[0], atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(mine.values[i, :, 7 - ids.shape[1] :], other.values[0], atol=1e-5, rtol=1e-5)


def test_a_prompt_is_padded_with_its_own_token_so_that_no_penalty_meets_another():
    assert left_padded([(5, 6, 7), (4, 3)], torch.device("cpu")).tolist() == [[5, 6, 7], [4, 4, 3]]
