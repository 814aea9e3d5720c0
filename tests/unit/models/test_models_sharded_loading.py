"""Sharded loading: the memory into which a policy is read, and the checks of tensor parallelism before a run starts."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lowpeak import PPOConfig
from lowpeak.arguments.base import ModelSettings
from lowpeak.arguments.online import resolve_online
from lowpeak.arguments.parallelism import ModelParallel
from lowpeak.arguments.ppo import resolve_ppo
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.models.load import load_policy
from lowpeak.models.pretrained import from_pretrained
from lowpeak.models.sharded_loading import (
    GRAD_ALLREDUCE_STYLE,
    device_map_for_loading,
    init_without_weights,
    load_tensor_parallel,
    modules_with_style,
)
from tiny_models import tiny_model

DEVICE = torch.device("meta")  # with separate memory, as a GPU


def test_an_unsharded_policy_is_read_into_its_devices_memory(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    for device, expected in ((DEVICE, "meta"), (torch.device("cpu"), "cpu"), (None, "cpu")):
        policy = load_policy(str(tmp_path), ModelSettings({"dtype": "float32"}), device=device)
        assert {parameter.device.type for parameter in policy.parameters()} == {expected}


def test_ranks_that_read_no_weights_generate_until_the_same_tokens(tmp_path):
    model = tiny_model()
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(tmp_path)
    policy = init_without_weights(AutoModelForCausalLM, str(tmp_path), {"revision": "main"})
    assert policy.generation_config.eos_token_id == [1, 7]
    (tmp_path / "generation_config.json").unlink()
    assert init_without_weights(AutoModelForCausalLM, str(tmp_path), {}).generation_config.eos_token_id == 1


@patch.dict(os.environ)
def test_no_device_map_is_set_under_fsdp_or_if_the_user_or_a_quantiser_sets_one():
    assert device_map_for_loading(DEVICE, {}) == {"device_map": {"": DEVICE}}
    for option in ("device_map", "quantization_config"):
        assert device_map_for_loading(DEVICE, {option: object()}) == {}
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    assert device_map_for_loading(DEVICE, {}) == {}


class Auto:
    """Returns an unsharded model, with the plan of a tensor parallel one."""

    def __init__(self, plan=None, **sizes):
        self._model = tiny_model(**sizes)
        if plan is not None:
            self._model._tp_plan = plan

    def from_pretrained(self, name, distributed_config, **options):
        self._model.request = (name, distributed_config.tp_size, distributed_config.fsdp_size, options)
        return self._model, {}


def test_transformers_shards_a_model_which_its_trainer_sees_as_unsharded():
    model, _ = load_tensor_parallel(Auto(vocab_size=16), "m", {"dtype": "auto"}, ModelParallel(2, 4))
    assert model.request == ("m", 2, 4, {"dtype": "auto"})
    assert not model.is_distributed_loading_by_transformers


@pytest.mark.parametrize(
    ("auto", "cut", "message"),
    [
        (Auto({"model.layers.*.mlp.experts": "moe_tp_experts"}), ModelParallel(2, 1), "moe_tp_experts"),
        (Auto(), ModelParallel(4, 1), "num_key_value_heads=2.*tp_size=4"),
        (Auto(vocab_size=14), ModelParallel(2, 2), "14 .* 2 x 2 "),
    ],
)
def test_an_unsupported_plan_or_size_is_an_error(auto, cut, message):
    with pytest.raises(ArgumentError, match=message):
        load_tensor_parallel(auto, "m", {}, cut)


def test_an_untied_embedding_or_one_without_fsdp_can_have_any_number_of_rows():
    load_tensor_parallel(Auto(vocab_size=14, tied=False), "m", {}, ModelParallel(2, 2))
    load_tensor_parallel(Auto(vocab_size=13), "m", {}, ModelParallel(2, 1))


def test_a_tensor_missing_from_a_tensor_parallel_models_checkpoint_is_named():
    class Lacking(Auto):
        from_config = None

        def from_pretrained(self, name, **options):
            model, _ = super().from_pretrained(name, **options)
            return model, {"missing_keys": {"lm_head.weight"}, "mismatched_keys": set()}

    with pytest.raises(ModelError, match=r"'m' .*lm_head\.weight"):
        from_pretrained(Lacking(vocab_size=16), "m", ModelParallel(2, 4))


def test_hooks_that_all_reduce_after_each_micro_batch_are_removed():
    auto = Auto({"model.layers.*.input_layernorm": GRAD_ALLREDUCE_STYLE})
    layers = auto._model.model.layers
    for layer in layers:
        layer.input_layernorm.forward = lambda hidden: hidden
    model, _ = load_tensor_parallel(auto, "m", {}, ModelParallel(2, 1))
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
def test_instances_adapters_and_quantised_models_are_refused_under_tensor_parallelism(model, options, adapter, message):
    with pytest.raises(ArgumentError, match=message):
        load_policy(model, ModelSettings(options or {}), peft_config=adapter, model_parallel=ModelParallel(2, 1))


@pytest.mark.parametrize("critic", ["adapter", "model"])
def test_a_critic_other_than_a_head_is_refused_under_tensor_parallelism(tmp_path, critic):
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, critic=critic, max_steps=1)
    resolve_ppo(args, resolve_online(args, 1, 1))
    cut = copy.copy(args)
    cut.__class__ = type("CutConfig", (PPOConfig,), {"model_parallel": ModelParallel(2, 1)})
    with pytest.raises(ArgumentError, match=f"critic='{critic}'"):
        resolve_ppo(cut, resolve_online(args, 1, 1))
