"""Sampled sequences of length 3 of a tiny vocabulary have the probabilities that the model and the filters give them.

The expected probabilities come from plain forwards and transformers' own logits processors, over every sequence.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lowpeak.arguments.sampling import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.engine import NativeEngine
from tiny_models import char_tokenizer, tiny_model

VOCABULARY = 6
LENGTH = 3
DRAWS = 6000
PROMPTS = [Prompt(4, (3, 5, 2), ""), Prompt(9, (4,), "")]
END = 1  # the model's and the tokenizer's end of sequence: some sequences are shorter

FILTERS = {
    "top-k": ({"top_k": 3}, [TopKLogitsWarper(3)]),
    "top-p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min-p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "all": (
        {"repetition_penalty": 0.7, "temperature": 1.5, "top_k": 5, "top_p": 0.95, "min_p": 0.05},
        [
            RepetitionPenaltyLogitsProcessor(0.7),
            TemperatureLogitsWarper(1.5),
            TopKLogitsWarper(5),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.05),
        ],
    ),
}


def _exact(model: nn.Module, prompt: tuple[int, ...], processors: list) -> dict[tuple[int, ...], float]:
    """The probability of every sequence that ends by itself or has full length."""
    process = LogitsProcessorList(processors)
    found: dict[tuple[int, ...], float] = {}
    open_ones: dict[tuple[int, ...], float] = {(): 1.0}
    while open_ones:
        sequence, probability = open_ones.popitem()
        ids = torch.tensor([[*prompt, *sequence]])
        with torch.no_grad():
            probs = process(ids, model(input_ids=ids).logits[:, -1]).softmax(-1)[0].tolist()
        for token, factor in enumerate(probs):
            longer = (*sequence, token)
            ended = token == END or len(longer) == LENGTH
            if factor > 0:
                (found if ended else open_ones)[longer] = probability * factor
    assert math.isclose(sum(found.values()), 1, abs_tol=1e-5)
    return found


def _deviation(counts: Counter, exact: dict[tuple[int, ...], float]) -> float:
    """How many standard deviations chi-square lies from its mean; rare sequences share a bin."""
    common = {sequence: p * DRAWS for sequence, p in exact.items() if p * DRAWS >= 5}
    observed = [counts[sequence] for sequence in common]
    expected = list(common.values())
    rest = DRAWS - sum(expected)
    if rest > 1:
        observed.append(DRAWS - sum(observed))
        expected.append(rest)
    chi_square = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return (chi_square - (len(expected) - 1)) / math.sqrt(2 * (len(expected) - 1))


@pytest.mark.parametrize(("settings", "processors"), FILTERS.values(), ids=FILTERS)
def test_all_sequences_come_as_often_as_the_model_says(settings, processors):
    model = tiny_model(VOCABULARY, seed=3)
    engine = NativeEngine(lambda: contextlib.nullcontext(model), char_tokenizer("0123"), lambda: 1 << 24)
    engine.load([], 0)
    sampling = Sampling(num_generations=DRAWS, max_new_tokens=LENGTH, seed=11, **settings)
    for group in engine.generate(PROMPTS, sampling):
        counts = Counter(tuple(completion.ids.tolist()) for completion in group.completions)
        exact = _exact(model, group.prompt.ids, processors)
        assert len(exact) > 10
        assert counts.keys() <= exact.keys()
        assert abs(_deviation(counts, exact)) < 3
