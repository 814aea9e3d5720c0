"""Into which memory a policy is read: its device's at once, unless something else cuts or places it.

What tensor parallelism is refused with is said before or right after a model is cut, never found out in a run.
"""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lowpeak import PPOConfig
from lowpeak.arguments import Cut, resolve_online, resolve_ppo
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.models import (
    GRAD_ALLREDUCE_STYLE,
    device_map_for_loading,
    from_pretrained,
    load_policy,
    load_tensor_parallel,
    modules_with_style,
)
from tiny import tiny_model

DEVICE = torch.device("meta")  # apart from the host's memory, as a GPU is


def test_a_policy_that_trains_whole_is_read_into_the_memory_of_its_device(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    for device, expected in ((DEVICE, "meta"), (torch.device("cpu"), "cpu"), (None, "cpu")):
        policy = load_policy(str(tmp_path), {"dtype": "float32"}, trust_remote_code=False, device=device)
        assert {parameter.device.type for parameter in policy.parameters()} == {expected}


@patch.dict(os.environ)
def test_one_that_fsdp_will_cut_or_the_user_or_a_quantiser_places_is_not():
    assert device_map_for_loading(DEVICE, {}) == {"device_map": {"": DEVICE}}
    for given in ("device_map", "quantization_config"):
        assert device_map_for_loading(DEVICE, {given: object()}) == {}
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    assert device_map_for_loading(DEVICE, {}) == {}


class Auto:
    """Gives a model that nobody has cut, with the plan of one that was."""

    def __init__(self, plan=None, **sizes):
        self._model = tiny_model(**sizes)
        if plan is not None:
            self._model._tp_plan = plan

    def from_pretrained(self, name, distributed_config, **options):
        self._model.asked = (name, distributed_config.tp_size, distributed_config.fsdp_size, options)
        return self._model, {}


def test_a_model_is_cut_by_transformers_and_told_that_nobody_did():
    model, _ = load_tensor_parallel(Auto(vocab_size=16), "m", {"dtype": "auto"}, Cut(2, 4))
    assert model.asked == ("m", 2, 4, {"dtype": "auto"})
    assert not model.is_distributed_loading_by_transformers


@pytest.mark.parametrize(
    ("auto", "cut", "message"),
    [
        (Auto({"model.layers.*.mlp.experts": "moe_tp_experts"}), Cut(2, 1), "moe_tp_experts"),
        (Auto(), Cut(4, 1), "num_key_value_heads=2.*tp_size=4"),
        (Auto(vocab_size=14), Cut(2, 2), "14 .* 2 x 2 "),
    ],
)
def test_a_model_that_would_be_cut_wrong_is_refused(auto, cut, message):
    with pytest.raises(ArgumentError, match=message):
        load_tensor_parallel(auto, "m", {}, cut)


def test_a_weight_that_is_not_tied_or_not_cut_by_rows_may_have_any_number_of_them():
    load_tensor_parallel(Auto(vocab_size=14, tied=False), "m", {}, Cut(2, 2))
    load_tensor_parallel(Auto(vocab_size=13), "m", {}, Cut(2, 1))


def test_a_tensor_that_the_checkpoint_of_a_model_in_parts_lacks_is_named():
    class Lacking(Auto):
        from_config = None

        def from_pretrained(self, name, **options):
            model, _ = super().from_pretrained(name, **options)
            return model, {"missing_keys": {"lm_head.weight"}, "mismatched_keys": set()}

    with pytest.raises(ModelError, match=r"'m' .*lm_head\.weight"):
        from_pretrained(Lacking(vocab_size=16), "m", Cut(2, 4))


def test_hooks_that_add_a_gradient_up_after_each_micro_batch_go():
    auto = Auto({"model.layers.*.input_layernorm": GRAD_ALLREDUCE_STYLE})
    layers = auto._model.model.layers
    for layer in layers:
        layer.input_layernorm.forward = lambda hidden: hidden
    model, _ = load_tensor_parallel(auto, "m", {}, Cut(2, 1))
    assert list(modules_with_style(model, GRAD_ALLREDUCE_STYLE)) == [layer.input_layernorm for layer in layers]
    assert all("forward" not in vars(layer.input_layernorm) for layer in layers)


@pytest.mark.parametrize(
    ("model", "options", "adapter", "message"),
    [
        (nn.Linear(1, 1), None, None, "instance"),
        ("m", None, SimpleNamespace(), "adapters"),
        ("m", {"quantization_config": {}}, None, "quantised"),
    ],
)
def test_what_is_not_cut_where_it_loads_is_refused(model, options, adapter, message):
    with pytest.raises(ArgumentError, match=message):
        load_policy(model, options, trust_remote_code=False, peft_config=adapter, cut=Cut(2, 1))


@pytest.mark.parametrize("critic", ["adapter", "model"])
def test_a_critic_other_than_a_head_is_refused(tmp_path, critic):
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, critic=critic, max_steps=1)
    resolve_ppo(args, resolve_online(args, 1, 1))
    cut = copy.copy(args)
    cut.__class__ = type("CutConfig", (PPOConfig,), {"cut": Cut(2, 1)})
    with pytest.raises(ArgumentError, match=f"critic='{critic}'"):
        resolve_ppo(cut, resolve_online(args, 1, 1))
