"""Exported parameters on one device: names, slices, adapters merged or alone, and adapters that cannot be merged."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from lowpeak.errors import ArgumentError
from lowpeak.parallel.parameters import (
    adapter_state_dict,
    broadcast_slices,
    clean_parameter_name,
    exported_parameters,
    layout,
    unchanged_names,
)
from tiny_models import tiny_model

REPLICATED = lambda parameter: None  # noqa: E731 every rank has the whole parameter


def exported(model, weights="merged", max_bytes=100, dtype=None):
    """The exported tensors, put together from slices that follow one another."""
    parts_of: dict[str, list[torch.Tensor]] = {}
    shapes = {}
    for piece in broadcast_slices(exported_parameters(model, REPLICATED, weights), max_bytes, dtype):
        assert piece.values.numel() * piece.values.element_size() <= max_bytes
        assert piece.start == sum(len(part) for part in parts_of.get(piece.name, []))
        parts_of.setdefault(piece.name, []).append(piece.values.clone())
        shapes[piece.name] = piece.shape
    assert shapes == {name: shape for name, (shape, _) in layout(model, REPLICATED, weights).items()}
    return {name: torch.cat(parts).view(shapes[name]) for name, parts in parts_of.items()}


def with_adapter(model=None, **settings):
    torch.manual_seed(3)
    config = LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **settings})
    peft = get_peft_model(model or tiny_model(), config)
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
            assert "lora" in name or "modules_to_save" in name
    return peft


def assert_merged_as_peft(peft):
    ours = exported(peft)
    theirs = dict(peft.merge_and_unload().named_parameters())
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("adapted", [False, True])
def test_saved_buffers_are_exported_in_their_own_dtype_and_not_with_an_adapter(adapted):
    model = tiny_model()
    layer = model.model.layers[0]
    layer.register_buffer("steps", torch.tensor([3, 4]))
    layer.register_buffer("bias", torch.tensor(1 / 3))
    layer.register_buffer("passing", torch.ones(2), persistent=False)
    model = with_adapter(model) if adapted else model
    ours = exported(model, dtype=torch.bfloat16)
    assert ours["model.layers.0.steps"].tolist() == [3, 4]
    assert ours["model.layers.0.bias"] == torch.tensor(1 / 3)
    assert not any(name.endswith("passing") for name in ours)
    assert not adapted or not any(name.endswith(("steps", "bias")) for name in exported(model, "adapter"))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_is_exported_under_its_names_in_the_receivers_dtype_with_tied_weights_once(dtype):
    model = tiny_model()
    ours = exported(model, dtype=dtype)
    assert ours.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(ours[name], p.to(dtype or p.dtype)) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"target_modules": ["embed_tokens", "q_proj"]}, {"modules_to_save": ["lm_head"]}],
    ids=["linear", "scaled by the root", "an embedding", "a module to save"],
)
def test_an_adapter_is_merged_as_peft_merges_it(settings):
    assert_merged_as_peft(with_adapter(tiny_model(tied=False), **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
    ],
)
def test_an_adapter_that_unties_weights_is_exported_as_both(settings):
    peft = with_adapter(tiny_model(tied=True), **settings)
    ours, apart = exported(peft), tiny_model(tied=False)
    apart.load_state_dict(ours)  # checks that all names are present
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(apart(ids).logits, peft.eval()(ids).logits, atol=1e-5, rtol=1e-5)


def test_an_adapter_that_keeps_weights_tied_is_exported_with_one():
    for settings in ({}, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}):
        peft = with_adapter(tiny_model(tied=True), **settings)
        assert exported(peft).keys() == dict(tiny_model().named_parameters()).keys()


def test_a_tied_adapter_parameter_is_exported_once_and_saved_under_each_name(tmp_path):
    peft = with_adapter(tiny_model(tied=True), modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    state = adapter_state_dict(peft, exported(peft, "adapter"))
    assert len(state) == len(exported(peft, "adapter")) + 1
    peft.save_pretrained(tmp_path, state_dict=state)
    again, ids = PeftModel.from_pretrained(tiny_model(tied=True), tmp_path), torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(again.eval()(ids).logits, peft.eval()(ids).logits)


def test_two_active_adapters_are_both_merged():
    peft = with_adapter()
    peft.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    peft.base_model.set_adapter(["default", "other"])
    assert_merged_as_peft(peft)


def test_an_adapter_alone_has_pefts_names_and_the_base_excludes_it():
    peft = with_adapter(tiny_model(tied=False), modules_to_save=["lm_head"])
    pairs = [(exported(peft, "adapter"), get_peft_model_state_dict(peft))]
    pairs.append((exported(with_adapter(), "base"), dict(tiny_model().named_parameters())))
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True, "target_modules": ["q_proj"]}])
def test_an_adapter_other_than_plain_lora_is_an_error(settings):
    with pytest.raises(ArgumentError, match=r"q_proj\.weight|down_proj\.weight"):
        exported(with_adapter(**settings))


def test_names_exclude_wrappers():
    assert (
        clean_parameter_name("model._orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight")
        == "model.layers.0.mlp.weight"
    )


def test_training_leaves_frozen_weights_without_an_adapter_unchanged():
    assert unchanged_names(tiny_model()) == frozenset()
    peft = with_adapter()
    before, names = exported(peft), unchanged_names(peft)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    after = exported(peft)
    assert names == {name for name, weight in after.items() if torch.equal(weight, before[name])}
    assert names
    assert names < after.keys()
