"""Models whose layers are not plain causal attention are refused, with the reason."""

from __future__ import annotations

import re

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from forests import MODELS, NUM_IDS, SIZES, model_of
from lowpeak.attention import install_attention, packing_unsupported_reason
from lowpeak.errors import ModelError
from tiny import tiny_model

GROUPED = {**SIZES, "num_key_value_heads": 2}
SMALL = {"vocab_size": NUM_IDS, "hidden_size": 32, "num_hidden_layers": 2}


def made(name, **config):
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**config))


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 1}
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(text_config={**GROUPED, "rope_parameters": rope}, vision_config=vision)
    )


def with_rope(**rope):
    return made("Llama", **GROUPED, rope_parameters={"rope_theta": 10000.0, **rope})


def with_dropout():
    return made("Llama", **GROUPED, attention_dropout=0.1)


def eager():
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


REFUSED = {
    "Mistral": (lambda: made("Mistral", **GROUPED, sliding_window=8), "sliding"),
    "Qwen2 with windows": (
        lambda: made("Qwen2", **GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "sliding_attention",
    ),
    "Gemma2": (lambda: made("Gemma2", **GROUPED, head_dim=16), "sliding_attention"),
    "Llama4": (
        lambda: hf.Llama4ForCausalLM(
            hf.Llama4TextConfig(**GROUPED, head_dim=16, intermediate_size_mlp=64, num_local_experts=2)
        ),
        "chunked_attention",
    ),
    "GPT-OSS": (lambda: made("GptOss", **GROUPED, head_dim=16, num_local_experts=2), "sliding_attention"),
    "Mamba": (lambda: made("Mamba", **SMALL), "state"),
    "Qwen3-Next": (
        lambda: made("Qwen3Next", **GROUPED, head_dim=16, num_experts=2, layer_types=["linear_attention"] * 2),
        "state",
    ),
    "Qwen2-VL": (qwen2_vl, "images"),
    "Bloom": (lambda: made("Bloom", vocab_size=NUM_IDS, hidden_size=32, n_layer=1, n_head=4), "interface"),
    "Falcon with ALiBi": (lambda: made("Falcon", **SMALL, num_attention_heads=4, alibi=True), "ALiBi"),
    "several positions a token": (lambda: with_rope(rope_type="default", mrope_section=[1, 1]), "multimodal"),
    "dynamic rotation": (lambda: with_rope(rope_type="dynamic", factor=2.0), "(dynamic)"),
    "attention dropout": (with_dropout, "dropout"),
    "encoder-decoder": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=NUM_IDS, d_model=32, d_ff=32, num_layers=1)),
        "encoder-decoder",
    ),
    "no causal LM": (lambda: nn.Linear(2, 2), "Linear "),
    "eager": (eager, "'eager'"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_plain_attention_are_taken(name):
    assert packing_unsupported_reason(model_of(name)) is None


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    model = make()
    assert reason in packing_unsupported_reason(model)
    with pytest.raises(ModelError, match=re.escape(reason)):
        install_attention(model)


def test_dropout_that_was_turned_off_is_no_reason():
    model = with_dropout()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    assert packing_unsupported_reason(model) is None


def test_wrapped_models_are_looked_into():
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    assert packing_unsupported_reason(Wrapped(tiny_model())) is None
    assert "sliding" in packing_unsupported_reason(Wrapped(made("Mistral", **GROUPED, sliding_window=8)))


def test_adapters_are_looked_into():
    config = LoraConfig(target_modules=["q_proj"])
    assert packing_unsupported_reason(get_peft_model(tiny_model(), config)) is None
    windows = get_peft_model(made("Mistral", **GROUPED, sliding_window=8), config)
    assert "sliding" in packing_unsupported_reason(windows)


def test_a_full_window_setting_without_layers_that_use_it_is_no_reason():
    assert packing_unsupported_reason(made("Qwen2", **GROUPED, sliding_window=8)) is None
    assert packing_unsupported_reason(made("Mistral", **GROUPED, sliding_window=None)) is None


def test_a_model_without_storage_can_be_asked():
    with torch.device("meta"):
        assert packing_unsupported_reason(made("Llama", **GROUPED)) is None
