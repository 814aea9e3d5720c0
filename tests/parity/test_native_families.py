"""Each family's greedy tokens are those of generate(), on every supported transformers."""

from __future__ import annotations

import contextlib

import pytest
from test_native_greedy import generated_alone

from lowpeak.arguments.sampling import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.engine import NativeEngine
from model_families import FAMILIES, is_known, make_family
from tiny_models import char_tokenizer

PROMPTS = [Prompt(i, ids, "") for i, ids in enumerate([(2, 3, 4, 5, 6, 7, 8), (9, 9), (4, 5, 6)])]
GREEDY = Sampling(num_generations=2, max_new_tokens=12, temperature=0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_greedy_tokens_are_those_of_generate_on_each_prompt_alone(family):
    if not is_known(family):
        pytest.skip(f"this transformers has no {FAMILIES[family][0]}")
    model = make_family(family)
    expected = generated_alone(model, PROMPTS, 12)
    engine = NativeEngine(lambda: contextlib.nullcontext(model), char_tokenizer(), lambda: 1 << 24)
    engine.load([], 0)
    groups = engine.generate(PROMPTS, GREEDY)
    assert [completion.ids.tolist() for group in groups for completion in group.completions] == [
        tokens for tokens in expected for _ in range(2)
    ]
