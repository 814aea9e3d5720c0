"""The core under peft and in 4 bits: adapters beside the head, on it, and in its place."""

from __future__ import annotations

import copy

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_logprobs_head import NUM_IDS, ask, batch, check, token_loss

from lowpeak.errors import ModelError
from lowpeak.heads.lm_head import install_head
from lowpeak.heads.self_check import verify_head
from rounding import assert_close_to_largest
from tiny_models import tiny_model

ADAPTERS = {
    "beside the head": {"target_modules": ["q_proj", "v_proj"]},
    "on the head": {"target_modules": ["q_proj", "lm_head"]},
    "a trained copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "a trained copy of both ends": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "some tokens of the embedding": {"target_modules": ["q_proj"], "trainable_token_indices": [2, 5]},
}  # fmt: skip


def adapted(name, tied=False, **options):
    torch.manual_seed(3)
    model = get_peft_model(tiny_model(NUM_IDS, tied=tied), LoraConfig(r=3, **ADAPTERS[name], **options))
    with torch.no_grad():  # adapters that do something
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, False) for name in ADAPTERS), ("some tokens of the embedding", True)]
)
def test_values_and_gradients_of_all_trained_parameters_equal_those_of_full_logits(name, tied):
    gradients = check(adapted(name, tied=tied))
    trained = {parameter for parameter, gradient in gradients.items() if gradient is not None}
    assert trained
    assert all("lora" in p or "modules_to_save" in p or "trainable_tokens" in p for p in trained)


@pytest.mark.parametrize("name", ADAPTERS)
def test_with_adapters_off_the_head_is_the_base_models(name):
    data, model = batch(), install_head(adapted(name))
    base = install_head(tiny_model(NUM_IDS, tied=False))
    with torch.no_grad(), model.disable_adapter():
        off = model(input_ids=data[0], head_request=ask(data))["logprobs"]
    on = model(input_ids=data[0], head_request=ask(data))["logprobs"]
    expected = base(input_ids=data[0], head_request=ask(data))["logprobs"]
    assert_close_to_largest(off, expected, 2e-6)
    assert not torch.allclose(on, expected, atol=1e-3)


@pytest.mark.parametrize("name", ["on the head", "a trained copy of the head"])
def test_a_deep_copy_calls_its_own_adapters(name):
    data, model = batch(), install_head(adapted(name))
    twin = copy.deepcopy(model)
    twin(input_ids=data[0], head_request=ask(data, loss=token_loss))["loss"].backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["on the head", "a trained copy of the head"])
def test_adapters_added_after_installing_ask_for_it_again(name):
    data, model = batch(), install_head(tiny_model(NUM_IDS, tied=False))
    model = get_peft_model(model, LoraConfig(r=3, **ADAPTERS[name]))
    if name == "on the head":
        with pytest.raises(ModelError, match="install_head"):
            model(input_ids=data[0], head_request=ask(data))
    install_head(model)
    assert verify_head(model) < 1e-5
    ids = data[0]
    assert torch.isfinite(model(input_ids=ids).logits).all()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trained_copy_of_the_head_takes_the_path_of_a_plain_head(when):
    data, model = batch(), tiny_model(NUM_IDS, tied=False)
    if when == "before":
        install_head(model)
    model = install_head(get_peft_model(model, LoraConfig(r=3, **ADAPTERS["a trained copy of the head"])))
    loss = model(input_ids=data[0], head_request=ask(data, loss=token_loss))["loss"]
    assert "_FusedLoss" in type(loss.grad_fn).__name__


def test_a_plain_head_that_became_a_layer_of_an_adapter_is_itself_again():
    model = install_head(tiny_model(NUM_IDS, tied=False, dtype=torch.bfloat16), cast_head_to_fp32=True)
    model = install_head(get_peft_model(model, LoraConfig(r=3, **ADAPTERS["on the head"])))
    hidden = torch.zeros(1, 32, dtype=torch.bfloat16)
    assert model.get_base_model().lm_head.base_layer(hidden).dtype == torch.bfloat16


def test_dropout_in_an_adapter_on_the_head_falls_alike_in_backward():
    model, data = install_head(adapted("on the head", lora_dropout=0.5)).train(), batch()
    torch.manual_seed(5)
    answer = model(input_ids=data[0], head_request=ask(data))
    loss = token_loss(answer["logprobs"], None, 0, 9)
    head = model.get_base_model().lm_head.lora_A["default"].weight
    (found,) = torch.autograd.grad(loss, head)
    direction = torch.randn_like(head)

    def at(step):
        torch.manual_seed(5)
        with torch.no_grad():
            head.add_(step * direction)
            answer = model(input_ids=data[0], head_request=ask(data))
            head.sub_(step * direction)
        return token_loss(answer["logprobs"], None, 0, 9)

    slope = (at(1e-2) - at(-1e-2)) / 2e-2
    torch.testing.assert_close((found * direction).sum(), slope, rtol=2e-2, atol=1e-3)


def test_activation_checkpointing_with_frozen_embeddings_trains_the_adapters():
    model = adapted("beside the head").train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    check(model)


def test_generation_under_an_adapter_is_what_it_was():
    ids, model = batch()[0], adapted("on the head")
    before = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(install_head(model).generate(input_ids=ids, max_new_tokens=5, do_sample=False), before)


def test_a_head_in_four_bits_is_called_as_it_is():
    model = tiny_model(NUM_IDS, tied=False, hidden=64)
    quantized = bitsandbytes.nn.Linear4bit(64, NUM_IDS, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    quantized.weight = bitsandbytes.nn.Params4bit(model.lm_head.weight.data, requires_grad=False, quant_type="nf4")
    model.lm_head = quantized.to("cpu")
    check(model)
