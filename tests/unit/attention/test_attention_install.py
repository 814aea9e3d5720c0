"""Installed attention changes nothing without a forest, and refuses unknown arguments with one."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forest_cases import MODELS, NUM_IDS, SIZES, forest_of, length_of, model_of
from lowpeak.attention.install import (
    ATTENTION_NAME,
    forward_arguments,
    install_attention,
    packing_unsupported_reason,
    uninstall_attention,
)
from lowpeak.errors import ModelError
from tiny_models import tiny_model

GROUPED = {**SIZES, "num_key_value_heads": 2}
SMALL = {"vocab_size": NUM_IDS, "hidden_size": 32, "num_hidden_layers": 2}


def made(name, **config):
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**config))


def with_rope(**rope):
    return made("Llama", **GROUPED, rope_parameters={"rope_theta": 10000.0, **rope})


def with_dropout():
    return made("Llama", **GROUPED, attention_dropout=0.1)


REFUSED = {
    "Llama4": (
        lambda: hf.Llama4ForCausalLM(
            hf.Llama4TextConfig(**GROUPED, head_dim=16, intermediate_size_mlp=64, num_local_experts=2)
        ),
        "attn_temperature_tuning",
    ),
    "RecurrentGemma": (lambda: made("RecurrentGemma", **SMALL, num_attention_heads=4, intermediate_size=64), "states"),
    "Bloom": (lambda: made("Bloom", vocab_size=NUM_IDS, hidden_size=32, n_layer=1, n_head=4), "interface"),
    "Falcon with ALiBi": (lambda: made("Falcon", **SMALL, num_attention_heads=4, alibi=True), "ALiBi"),
    "dynamic rotation": (lambda: with_rope(rope_type="dynamic", factor=2.0), "(dynamic)"),
    "attention dropout": (with_dropout, "dropout"),
    "encoder-decoder": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=NUM_IDS, d_model=32, d_ff=32, num_layers=1)),
        "encoder-decoder",
    ),
    "no causal LM": (lambda: nn.Linear(2, 2), "Linear "),
}


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


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [Wrapped, lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"]))])
def test_wrapped_models_and_adapters_are_looked_into(wrap):
    assert packing_unsupported_reason(wrap(tiny_model())) is None
    assert "dropout" in packing_unsupported_reason(wrap(with_dropout()))


def test_a_model_without_storage_can_be_asked():
    with torch.device("meta"):
        assert packing_unsupported_reason(made("Llama", **GROUPED)) is None


FOREST = forest_of((5, (3, 1, 4)), (0, (6,)), padding=2)


def ids_of(rows, length):
    return torch.randint(2, NUM_IDS, (rows, length), generator=torch.Generator().manual_seed(0))


def together(model):
    return model(ids_of(1, length_of(FOREST)), **forward_arguments(FOREST, "cpu")).logits


@pytest.mark.parametrize("name", MODELS)
def test_generation_and_padded_rows_with_their_gradients_are_unchanged_to_the_bit(name):
    model, rows = model_of(name), ids_of(3, 9)
    ids, mask = ids_of(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    keywords = {"attention_mask": mask, "max_new_tokens": 6, "output_scores": True, "return_dict_in_generate": True}

    def run():
        model.zero_grad()
        model(rows, labels=rows).loss.backward()
        generated = model.generate(ids, do_sample=False, **keywords)
        return [generated.sequences, *generated.scores, *(p.grad for p in model.parameters() if p.grad is not None)]

    before = run()
    install_attention(model)
    assert all(torch.equal(a, b) for a, b in zip(before, run(), strict=True))


def test_the_saved_config_is_unchanged(tmp_path):
    model = model_of("Llama")
    model.save_pretrained(tmp_path / "before")
    install_attention(model)
    model.save_pretrained(tmp_path / "after")
    before, after = (json.loads((tmp_path / x / "config.json").read_text()) for x in ("before", "after"))
    assert before == after
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "after").config._attn_implementation == "sdpa"


@torch.no_grad()
def test_a_deep_copy_takes_forests_too():
    model = model_of("Qwen2")
    install_attention(model)
    assert torch.equal(together(copy.deepcopy(model)), together(model))


@torch.no_grad()
def test_uninstalling_gives_back_what_was_there():
    model, ids = model_of("Qwen2"), ids_of(2, 5)
    before = model(ids).logits
    install_attention(model)
    install_attention(model)
    uninstall_attention(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before)
    uninstall_attention(model)


@torch.no_grad()
def test_a_model_that_shares_its_config_is_not_disturbed():
    model = model_of("Llama")
    other = LlamaForCausalLM(model.config).eval()
    ids = ids_of(2, 5)
    before = other(ids).logits
    install_attention(model)
    assert torch.equal(other(ids).logits, before)


def test_a_model_that_was_loaded_with_another_attention_keeps_it():
    model = model_of("Llama")
    model.set_attn_implementation("eager")
    assert "'eager'" in packing_unsupported_reason(model)
    with pytest.raises(ModelError, match=r"'eager'.*'sdpa'"):
        install_attention(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer, "attention_dropout", 0.1) or layer.train(), "dropout"),
        (lambda layer: setattr(layer, "is_causal", False), "causal"),
    ],
    ids=["dropout", "not causal"],
)
def test_what_a_layer_asks_for_in_vain_is_an_error(change, reason):
    model = model_of("Llama")
    install_attention(model)
    change(model.model.layers[1].self_attn)
    with pytest.raises(ModelError, match=reason):
        together(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("indices", torch.zeros(4)),
        ("sliding_window", 3),
        ("attention_mask", torch.ones(1, length_of(FOREST))),
    ],
)
def test_an_argument_that_attention_does_not_know_and_a_mask_of_the_callers_own_are_errors(name, value):
    model = model_of("Llama")
    install_attention(model)
    with pytest.raises(ModelError, match=rf"LlamaAttention .*\b{name.removeprefix('attention_')}\b"):
        model(ids_of(1, length_of(FOREST)), **(forward_arguments(FOREST, "cpu") | {name: value}))


class LargestOutput(TorchDispatchMode):
    """Bytes of the largest new tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.num_bytes = max(self.num_bytes, out.nbytes)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_per_sequence_attends_in_groups_of_heads_without_a_copy_of_the_cache(dtype):
    model = made("Qwen2", **GROUPED)
    install_attention(model)
    layer = model.model.layers[0].self_attn
    rows, width, columns = 3, 16, 200
    groups = layer.num_key_value_groups
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(rows, num_heads, length, width, generator=generator).to(dtype)
        for num_heads, length in ((2 * groups, 1), (2, columns), (2, columns))
    )
    mask = torch.where(torch.arange(columns) <= torch.tensor([[4], [150], [199]]), 0.0, torch.finfo(dtype).min)
    mask = mask.to(dtype)[:, None, None]
    with LargestOutput() as largest:
        found, _ = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](layer, query, key, value, mask, scaling=0.3, dropout=0.0)
    assert largest.num_bytes < key.nbytes
    every = [x.float().repeat_interleave(groups, dim=1) for x in (key, value)]
    expected = (0.3 * query.float() @ every[0].transpose(-1, -2) + mask.float()).softmax(-1) @ every[1]
    assert found.shape == (rows, 1, 2 * groups, width)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.float(), expected.transpose(1, 2), atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0
    )
