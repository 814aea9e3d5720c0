"""Turns of conversations: the tokens of `generate` for any slots, tools and order, with each token forwarded once."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowpeak.arguments.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache import bytes_per_token
from lowpeak.rollout.native.engine import NativeEngine
from tiny_models import char_tokenizer, tiny_model
from turn_programs import Programs, by_generate

SAMPLING = Sampling(num_generations=4, max_new_tokens=60, seed=3, stop_token_ids=(3, 4))


def engine(model: nn.Module, kv_cache_bytes: int = 1 << 24, **settings) -> NativeEngine:
    made = NativeEngine(lambda: contextlib.nullcontext(model), char_tokenizer(), lambda: kv_cache_bytes, **settings)
    made.load([], 0)
    return made


def prompts(number: int = 16, longest: int = 24) -> list[Prompt]:
    rng = random.Random(1)
    shared = [rng.randrange(2, 13) for _ in range(10)]
    lengths = [1, *(rng.randrange(12, longest + 1) for _ in range(number - 1))]
    return [Prompt(5 + i, tuple((shared + [2 + i % 11] * n)[:n]), "") for i, n in enumerate(lengths)]


def delays(seed: int, most: float):
    return lambda conversation, turn: random.Random(f"{seed}{conversation}{turn}").random() * most


@pytest.mark.parametrize("slots", [64, 16, 3, 1])
def test_turns_are_those_of_generate_for_any_number_of_slots_and_delay_of_tools(slots):
    model = tiny_model()
    budget = slots * (24 + 60) * bytes_per_token(model)
    log = Programs(prompts(), SAMPLING, delay=delays(slots, 0.05)).run(engine(model, budget))
    assert len({request.conversation for request, _ in log}) == 64
    assert len(log) > 128
    alone = engine(model)
    for request, turn in log:
        expected = by_generate(alone, request, SAMPLING)
        assert turn.ids == expected.ids.tolist()
        assert turn.finish_reason == expected.finish_reason
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected.logprobs, atol=1e-5, rtol=0)
