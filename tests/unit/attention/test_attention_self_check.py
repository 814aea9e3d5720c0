"""The start-up check passes plain models, and finds the unsupported ones that their configs do not reveal."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from forest_cases import cases_of, model_of
from lowpeak.attention import install, self_check
from lowpeak.attention.install import HeadShape, attend_forest, install_attention
from lowpeak.attention.self_check import attention_mismatch, packing_mismatch
from lowpeak.attention.spans import Span
from lowpeak.heads.lm_head import install_head
from tiny_models import tiny_model

CPU = torch.device("cpu")
DIFFERENCE = r"^Qwen2ForCausalLM .*\b(inf|\d[\d.e+-]*) .*, .*\b\d[\d.e+-]*$"  # what was found, and what is allowed


@pytest.mark.parametrize(("name", "dtype"), cases_of(torch.float32, torch.bfloat16, torch.float64))
def test_models_of_plain_attention_agree(name, dtype):
    model = model_of(name, dtype)
    install_attention(model)
    assert packing_mismatch(model, CPU) is None


def test_a_model_under_autocast_with_the_core_in_its_head_agrees():
    model = install_head(tiny_model())
    install_attention(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert packing_mismatch(model, CPU) is None


def test_every_modules_mode_and_gradients_are_left_as_they_were():
    model = tiny_model().train()
    model.model.layers[1].eval()
    install_attention(model)
    modes = [module.training for module in model.modules()]
    packing_mismatch(model, CPU)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_looks_at_the_token_before_it_is_found(dtype):
    """As a convolution or a state would: its first completion's neighbour in the row is not its neighbour in text."""
    model = tiny_model(dtype=dtype)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))
    install_attention(model)
    assert re.search(DIFFERENCE, packing_mismatch(model, CPU))


def test_a_window_that_is_longer_than_the_checks_sequences_is_checked_and_left_as_it_was(monkeypatch):
    model = model_of("Mistral")
    model.config.sliding_window = 4096
    install_attention(model)
    assert packing_mismatch(model, CPU) is None
    monkeypatch.setattr(install, "span_of_layer", lambda config, layer: Span(4))
    assert re.search("other hidden states", packing_mismatch(model, CPU))
    assert model.config.sliding_window == 4096


def test_positions_that_count_through_the_row_are_found():
    model = tiny_model()
    install_attention(model)

    def count(module, args, kwargs):
        return args, kwargs | {"position_ids": torch.arange(kwargs["position_ids"].shape[1])[None]}

    handle = model.model.rotary_emb.register_forward_pre_hook(count, with_kwargs=True)
    reason = packing_mismatch(model, CPU)
    handle.remove()
    assert reason is not None
    assert packing_mismatch(model, CPU) is None


def test_a_model_that_does_not_pass_the_forest_on_is_found():
    model = tiny_model()
    assert re.search(DIFFERENCE, packing_mismatch(model, CPU))  # nothing installed: sdpa drops what it does not know


def test_a_model_that_cannot_run_says_why():
    model = tiny_model()
    install_attention(model)
    other = copy.deepcopy(model)
    other.model.layers[0].self_attn.is_causal = False
    assert re.search("^Qwen2.*Attention.*causal", packing_mismatch(other, CPU))


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (torch.OutOfMemoryError("out of resource: triton_tem_fused_0 Required: 152064 Hardware limit:101376"), False),
    ],
    ids=str,
)
def test_a_check_that_runs_out_of_memory_raises_and_a_kernel_too_large_for_the_chip_is_a_reason(error, is_raised):
    model = tiny_model()
    install_attention(model)

    def fail(module, args):
        raise error

    model.model.layers[0].register_forward_pre_hook(fail)
    if is_raised:
        with pytest.raises(type(error), match="CUDA"):
            packing_mismatch(model, CPU)
    else:
        assert "152064" in packing_mismatch(model, CPU)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        *((dtype, ()) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        *((torch.float32, heads) for heads in ((128, 7), (96, 1), (32, 16))),
    ],
)
def test_the_kernel_of_this_device_agrees_with_the_definition_also_at_a_models_own_heads(dtype, heads):
    assert attention_mismatch(dtype, CPU, *heads) is None


@pytest.mark.parametrize("kind", [{"softcap": 2.0}, {"has_sinks": True}, {"span": Span(100)}], ids=str)
def test_the_kernel_is_checked_with_a_layers_window_cap_and_sinks(kind, monkeypatch):
    heads = HeadShape(64, 2, Span(), None, False)._replace(**kind)
    assert attention_mismatch(torch.float32, CPU, heads=heads) is None
    monkeypatch.setattr(
        self_check, "attend_forest", lambda q, k, v, layout, scale, *_: attend_forest(q, k, v, layout, scale)
    )
    assert "values" in attention_mismatch(torch.float32, CPU, heads=heads)


def test_hidden_states_that_are_no_numbers_are_found():
    """Where the first sequences of the row are right and a later one is not: a comparison with NaN must not pass."""
    model = tiny_model()
    install_attention(model)

    def spoil(module, args, out):
        return torch.cat([out[:, :20], out[:, 20:] * float("nan")], 1) if out.shape[1] > 20 else out

    model.model.layers[0].mlp.register_forward_hook(spoil)
    assert re.search(r"\bnan\b", packing_mismatch(model, CPU))


def test_a_model_that_calls_its_decoder_past_its_backbone_agrees():
    config = OPTConfig(
        vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32,
        dropout=0.0, attention_dropout=0.0, pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = OPTForCausalLM(config)
    install_attention(model)
    assert packing_mismatch(model, CPU) is None
