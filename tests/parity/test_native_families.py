"""Each family on the decode loop gives the greedy tokens of generate(), on every supported transformers."""

from __future__ import annotations

import contextlib

import pytest
from test_native_greedy import generated_alone

from lowpeak.arguments.sampling import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.engine import NativeEngine, unsupported_reason
from model_families import DECODE_LOOP, is_known, make_family
from tiny_models import char_tokenizer

PROMPTS = [Prompt(i, ids, "") for i, ids in enumerate([(2, 3, 4, 5, 6, 7, 8), (9, 9), (4, 5, 6)])]
GREEDY = Sampling(num_generations=2, max_new_tokens=12, temperature=0.0)


@pytest.mark.parametrize("family", DECODE_LOOP)
def test_a_familys_decode_loop_gives_the_tokens_of_generate(family):
    if not is_known(family):
        pytest.skip(f"this transformers has no {DECODE_LOOP[family][0]}")
    model = make_family(family)
    assert unsupported_reason(model) is None
    expected = generated_alone(model, PROMPTS, 12)
    engine = NativeEngine(lambda: contextlib.nullcontext(model), char_tokenizer(), lambda: 1 << 24)
    engine.load([], 0)
    groups = engine.generate(PROMPTS, GREEDY)
    assert [completion.ids.tolist() for group in groups for completion in group.completions] == [
        tokens for tokens in expected for _ in range(2)
    ]
