"""Recurrent and convolution layers over a forest give what each sequence gives by itself."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

from forest_cases import NUM_IDS, SIZES, forest_of, length_of, rows_of
from lowpeak.attention.install import forward_arguments, install_attention, uninstall_attention
from lowpeak.attention.mixers import MixerCalls, mixers_of

# Prompts of 5, 0, 1 and 9 tokens; completions of one token; one that forks.
FOREST = forest_of((5, (3, 1, 4)), (0, (6,)), (1, (2, 7)), (9, (1,)), (4, ((3, (2, 5)), 1)), padding=2)
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
SMALL = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
MODELS = {
    "gated delta rule": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **SMALL, **LAYERS, head_dim=16, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
        )
    ),
    "Mamba 2 beside attention": lambda: hf.FalconH1ForCausalLM(
        hf.FalconH1Config(**SMALL, **MAMBA, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, mamba_n_groups=1)
    ),
    "convolution": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])),
    "Mamba 1": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(**SMALL, **MAMBA, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4)
    ),
}  # fmt: skip


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def ids_1L():
    return torch.randint(2, NUM_IDS, (1, length_of(FOREST)), generator=torch.Generator().manual_seed(0))


def packed(model):
    logits = model(ids_1L(), **forward_arguments(FOREST, "cpu"), use_cache=False).logits
    return [logits[0, row] for row in rows_of(FOREST)]


def separate(model):
    return [model(ids_1L()[:, row], use_cache=False).logits[0] for row in rows_of(FOREST)]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 5e-5 * b.norm() + 1e-6


def gradients(model, logits):
    """Every parameter's gradient of a fixed random sum of the logits."""
    generator = torch.Generator().manual_seed(1)
    model.zero_grad()
    sum((each * torch.randn(each.shape, generator=generator)).sum() for each in logits).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_separate_sequences(name, checkpointed):
    model = model_of(name)
    expected = separate(model)
    expected_gradients = gradients(model, expected)
    install_attention(model)
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.train()
    found = packed(model)
    assert_close(found, expected)
    found_gradients = gradients(model, found)
    assert found_gradients.keys() == expected_gradients.keys()
    assert_close(found_gradients.values(), expected_gradients.values())


@torch.no_grad()
def test_a_deep_copy_runs_its_own_weights_and_uninstalling_restores_the_forward():
    model = model_of("convolution")
    install_attention(model)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(0.5)
    expected = separate(other)
    assert_close(packed(other), expected)
    uninstall_attention(other)
    assert not any("forward" in mixer.__dict__ for mixer in mixers_of(other))
    assert all(torch.equal(a, b) for a, b in zip(separate(other), expected, strict=True))


def test_a_prompt_is_computed_once_unless_the_mixer_takes_no_state():
    nodes = forest_of((64, (8,) * 8)).nodes
    num_tokens = {
        takes_state: sum(len(call.indices) for call in MixerCalls(nodes, 128, torch.device("cpu"), takes_state).calls)
        for takes_state in (True, False)
    }
    assert num_tokens == {True: 64 + 8 * 8, False: 8 * 72}
