"""Greedy tokens of the native engine equal generate() on each prompt alone."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lowpeak.arguments.sampling import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache_bytes import bytes_per_token
from lowpeak.rollout.native.engine import NativeEngine
from tiny_models import char_tokenizer, tiny_model

TEXTS = ("12=", "987654321=", "5=", "33333=", "0=", "4711=", "31415926535=")
GREEDY = Sampling(num_generations=2, max_new_tokens=24, temperature=0.0)


def _eager() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13, bos_token_id=None, eos_token_id=1, pad_token_id=0, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.2, attn_implementation="eager",
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def _prompts() -> list[Prompt]:
    tokenizer = char_tokenizer()
    return [Prompt(i, tuple(tokenizer(text)["input_ids"]), text) for i, text in enumerate(TEXTS)]


def _ours(model: nn.Module, sampling: Sampling, rows: int = 1000) -> list[list[int]]:
    longest = max(len(prompt.ids) for prompt in _prompts()) + sampling.max_new_tokens
    budget = rows * longest * bytes_per_token(model)
    engine = NativeEngine(lambda: contextlib.nullcontext(model), char_tokenizer(), lambda: budget)
    engine.load([], 0)
    groups = engine.generate(_prompts(), sampling)
    assert all(a.ids.tolist() == b.ids.tolist() for a, b in (group.completions for group in groups))
    return [group.completions[0].ids.tolist() for group in groups]


def generated_alone(model: nn.Module, prompts: list[Prompt], max_new_tokens: int, **settings) -> list[list[int]]:
    """The greedy tokens of generate() on each prompt alone."""
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        more = {"max_new_tokens": max_new_tokens, "do_sample": False, **settings}
        made.append(model.generate(ids, attention_mask=torch.ones_like(ids), **more)[0, ids.shape[1] :].tolist())
    return made


def _theirs(model: nn.Module, **settings) -> list[list[int]]:
    return generated_alone(model, _prompts(), 24, **settings)


@pytest.mark.parametrize("rows", [1, 3, 4, 1000])
def test_ragged_prompts_in_waves_of_any_size_give_the_tokens_of_generate(rows):
    model = tiny_model()
    assert _ours(model, GREEDY, rows) == _theirs(model)


@pytest.mark.parametrize("make", [_eager, lambda: tiny_model(dtype=torch.float64)])
def test_eager_attention_and_float64_give_the_tokens_of_generate(make):
    model = make()
    assert _ours(model, GREEDY) == _theirs(model)


@pytest.mark.parametrize("ends", [(9,), (5, 7)])
def test_rows_that_end_midway_give_the_tokens_of_generate(ends):
    model = tiny_model()
    expected = _theirs(model, eos_token_id=[1, *ends])
    assert len({len(ids) for ids in expected}) > 2
    assert _ours(model, replace(GREEDY, stop_token_ids=ends)) == expected


@pytest.mark.parametrize("rows", [1, 1000])
def test_a_minimum_of_tokens_gives_the_tokens_of_generate(rows):
    model, ends = tiny_model(), (5, 7, 9)
    eos = {"eos_token_id": [1, *ends]}
    expected = _theirs(model, min_new_tokens=4, **eos)
    assert min(map(len, expected)) >= 5 > min(map(len, _theirs(model, **eos)))
    assert _ours(model, replace(GREEDY, stop_token_ids=ends, min_new_tokens=4), rows) == expected


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        # transformers probes the tokenizer with these letters; the digits keep their ids.
        ({"stop": ("77", "3")}, {"stop_strings": ["77", "3"], "tokenizer": char_tokenizer("0123456789=abcdef")}),
    ],
)
def test_penalties_and_stop_strings_give_the_tokens_of_generate(ours, theirs):
    model = tiny_model()
    expected = _theirs(model, **theirs)
    assert expected != _theirs(model)
    assert _ours(model, replace(GREEDY, **ours)) == expected
