"""Rollouts under autocast read 16-bit copies of fp32 weights: same values, restored weights, within a budget."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from lowpeak.heads.lm_head import install_head
from lowpeak.rollout.native.copied_weights import weight_copies
from tiny_models import tiny_model


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=2))


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=2, vocab_size=64, num_local_experts=4))


def dora() -> nn.Module:
    """DoRA reads the weights of its layers for their norms; all other layers are copied."""
    model = get_peft_model(tiny_model(), LoraConfig(use_dora=True, init_lora_weights=False, target_modules=["q_proj"]))
    return model.base_model.model


def other_linear() -> nn.Module:
    class AddsBias(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return F.linear(hidden, self.weight).float() + self.bias

    model = tiny_model()
    attention = model.model.layers[0].self_attn
    attention.o_proj = AddsBias(attention.o_proj.in_features, attention.o_proj.out_features)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    ids_BL = torch.arange(21).view(3, 7) % 8
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return model(input_ids=ids_BL).logits


def state(model: nn.Module) -> list[object]:
    return [(p, module.__dict__.get("forward")) for module in model.modules() for p in module._parameters.values()]


@pytest.mark.parametrize("make", [tiny_model, gpt2, mixtral, dora, other_linear])
def test_products_read_copies_with_autocasts_values(make: Callable[[], nn.Module]):
    model = install_head(make().eval())
    expected, before = logits(model), state(model)
    with weight_copies(model, torch.bfloat16, 1 << 30):
        assert any(p.dtype == torch.bfloat16 for p in model.parameters())
        assert torch.equal(logits(model), expected)
    with pytest.raises(KeyboardInterrupt), weight_copies(model, torch.bfloat16, 1 << 30):
        raise KeyboardInterrupt
    assert all(a is b and f is g for (a, f), (b, g) in zip(state(model), before, strict=True))


def test_nothing_is_copied_beyond_the_budget_for_16_bit_weights_or_for_an_fp32_head(monkeypatch, caplog):
    model = install_head(tiny_model(), cast_head_to_fp32=True)
    linears = {m.weight: m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head}
    size = 2 * sum(p.numel() for m in linears.values() for p in m.parameters())
    for max_bytes, dtype in ((size - 1, torch.float32), (size, torch.bfloat16)):
        with weight_copies(model, torch.bfloat16, max_bytes):
            assert {m.weight.dtype for m in linears.values()} == {dtype}
            assert model.lm_head.weight.dtype == torch.float32

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("no room")

    before = state(model)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch.Tensor, "to", fail)
        with weight_copies(model, torch.bfloat16, size):
            assert state(model) == before
    assert "Out of memory" in caplog.text
    with weight_copies(model.bfloat16(), torch.bfloat16, size):
        assert not any("forward" in m.__dict__ for m in linears.values())
