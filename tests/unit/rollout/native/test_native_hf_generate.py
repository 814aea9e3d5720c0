"""Models that the decode loop cannot drive generate through generate(), with the same draws and records."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
)

from lowpeak.arguments.sampling import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.engine import NativeEngine, decode_by_generate, unsupported_reason
from lowpeak.rollout.native.output import OutputBuffer, StopStrings, end_token_ids
from lowpeak.rollout.native.scheduler import SequenceId, sequence_keys
from tiny_models import char_tokenizer, tiny_model

PROMPTS = [Prompt(i, ids, "") for i, ids in enumerate([(2, 3, 4, 5, 6, 7, 8), (9, 9), (4, 5, 6)])]
SAMPLING = Sampling(num_generations=3, max_new_tokens=8, temperature=0.9, top_k=9, repetition_penalty=1.1, seed=2)


COMMON = dict(vocab_size=13, bos_token_id=None, eos_token_id=1, max_position_embeddings=64, initializer_range=0.2)
NO_DROPOUT = dict(attention_dropout=0.0, embed_dropout=0.0, resid_dropout=0.0)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LOCAL = dict(hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4, window_size=4)
MODELS = {
    "(attn_temperature_tuning)": (
        Llama4ForCausalLM,
        Llama4TextConfig(**COMMON, **SIZES, head_dim=8, num_local_experts=2, intermediate_size_mlp=64, pad_token_id=0),
    ),
    "position_ids": (
        BloomForCausalLM,
        BloomConfig(vocab_size=13, hidden_size=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=1),
    ),
    "local": (GPTNeoForCausalLM, GPTNeoConfig(**COMMON, **LOCAL, **NO_DROPOUT)),
}


def _model(reason: str = "(attn_temperature_tuning)") -> nn.Module:
    torch.manual_seed(0)
    kind, config = MODELS[reason]
    return kind(config).eval()


def _engine(model: nn.Module) -> NativeEngine:
    engine = NativeEngine(lambda: contextlib.nullcontext(model), char_tokenizer(), lambda: 1 << 24)
    engine.load([], 0)
    return engine


def test_plain_models_are_driven_also_under_an_adapter():
    assert unsupported_reason(tiny_model()) is None
    assert unsupported_reason(get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))) is None


@pytest.mark.parametrize("reason", MODELS)
def test_other_models_say_why_they_are_not_driven_and_have_logprobs_of_a_plain_forward(reason):
    model = _model(reason)
    assert reason.split()[-1] in unsupported_reason(model)
    for group in _engine(model).generate(PROMPTS, SAMPLING):
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt.ids, *completion.ids.tolist()]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(group.prompt.ids) - 1 : -1]
            expected = (logits / 0.9).log_softmax(-1).gather(-1, completion.ids.long()[:, None])[:, 0]
            torch.testing.assert_close(completion.logprobs, expected, atol=2e-5, rtol=0)


MINIMUM = {"stop_token_ids": (5, 7, 9, 11), "stop": ("3",), "min_new_tokens": 3}


@pytest.mark.parametrize("changed", [{}, {"temperature": 0.0}, {"stop": ("33",)}, {"stop_token_ids": (5,)}, MINIMUM])
def test_the_fallback_draws_what_the_decode_loop_draws(changed):
    model, sampling = tiny_model(), replace(SAMPLING, **changed)
    rows = [SequenceId(i, j) for i in range(3) for j in range(3)]
    tokenizer = char_tokenizer()
    ends = (end_token_ids(model, tokenizer, sampling), StopStrings(tokenizer, sampling.stop, sampling.min_new_tokens))
    progress = OutputBuffer(9, sampling.max_new_tokens, *ends, None, torch.device("cpu"))
    ids = [PROMPTS[row.prompt].ids for row in rows]
    decode_by_generate(model, ids, sequence_keys(rows, PROMPTS, sampling), sampling, progress)
    driven = [c for group in _engine(model).generate(PROMPTS, sampling) for c in group.completions]
    for ours, other in zip(progress.completions(), driven, strict=True):
        assert ours.ids.tolist() == other.ids.tolist()
        assert ours.finish_reason == other.finish_reason
        torch.testing.assert_close(ours.logprobs, other.logprobs, atol=1e-5, rtol=0)


def test_the_models_own_generation_defaults_neither_act_nor_change_and_no_random_state_moves():
    model = _model()
    state = torch.get_rng_state()
    expected = _engine(model).generate(PROMPTS, SAMPLING)
    model.generation_config.update(repetition_penalty=5.0, no_repeat_ngram_size=1, do_sample=True, suppress_tokens=[3])
    own = model.generation_config
    again = _engine(model).generate(PROMPTS, SAMPLING)
    assert model.generation_config is own
    assert torch.equal(torch.get_rng_state(), state)
    for before, after in zip(expected, again, strict=True):
        assert [c.ids.tolist() for c in before.completions] == [c.ids.tolist() for c in after.completions]
