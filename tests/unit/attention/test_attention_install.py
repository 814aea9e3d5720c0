"""Installed attention changes nothing without a forest, and refuses unknown arguments with one."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from closeness import assert_close_to_largest
from forests import MODELS, NUM_IDS, forest_of, length_of, model_of, rows_of
from lowpeak.attention import forward_arguments, install_attention, uninstall_attention
from lowpeak.errors import ModelError

FOREST = forest_of((5, (3, 1, 4)), (0, (6,)), padding=2)


def ids_of(rows, length):
    return torch.randint(2, NUM_IDS, (rows, length), generator=torch.Generator().manual_seed(0))


def together(model):
    return model(ids_of(1, length_of(FOREST)), **forward_arguments(FOREST, "cpu")).logits


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_generation_is_unchanged_to_the_bit(name):
    model = model_of(name)
    ids, mask = ids_of(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    asked = {"attention_mask": mask, "max_new_tokens": 6, "output_scores": True, "return_dict_in_generate": True}
    before = model.generate(ids, do_sample=False, **asked)
    install_attention(model)
    after = model.generate(ids, do_sample=False, **asked)
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(a, b) for a, b in zip(before.scores, after.scores, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_padded_rows_and_their_gradients_are_unchanged_to_the_bit(name):
    model, ids = model_of(name), ids_of(3, 9)

    def run():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

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


@pytest.mark.parametrize(("name", "value"), [("softcap", 30.0), ("s_aux", torch.zeros(4)), ("sliding_window", 3)])
def test_an_argument_that_attention_does_not_know_is_an_error(name, value):
    model = model_of("Llama")
    install_attention(model)
    with pytest.raises(ModelError, match=rf"LlamaAttention .*\b{name}\b"):
        model(ids_of(1, length_of(FOREST)), **forward_arguments(FOREST, "cpu"), **{name: value})


def test_a_mask_of_the_callers_own_is_an_error():
    model = model_of("Llama")
    install_attention(model)
    arguments = forward_arguments(FOREST, "cpu") | {"attention_mask": torch.ones(1, length_of(FOREST))}
    with pytest.raises(ModelError, match=r"LlamaAttention .*\bmask\b"):
        model(ids_of(1, length_of(FOREST)), **arguments)


@torch.no_grad()
def test_a_forest_is_what_makes_the_difference():
    model = model_of("Qwen2")
    install_attention(model)
    ids = ids_of(1, length_of(FOREST))
    causal = model(ids, position_ids=FOREST.position_ids_1L, attention_mask=torch.ones_like(ids)).logits
    row = rows_of(FOREST)[1]
    alone = model(ids[:, row]).logits
    assert_close_to_largest(together(model)[:, row], alone, 3e-6)
    assert (causal[:, row] - alone).abs().max() > 0.1
