"""Sizes left to `auto` follow the memory that training leaves."""

from __future__ import annotations

import torch

from lowpeak.arguments import MemorySettings
from lowpeak.memory import free_bytes
from lowpeak.parallel import DeviceFractions
from lowpeak.ranks import Ranks
from lowpeak.training import Sizes, choose_layout, training_bytes
from tiny import tiny_model

CPU = torch.device("cpu")


def sizes(model: torch.nn.Module, **asked: int) -> Sizes:
    settings = MemorySettings(**asked)
    choice = choose_layout(settings, None)
    return Sizes.of(settings, model, CPU, choice, Ranks(), bf16=False, checkpointing=True, shares=DeviceFractions())


def test_training_adds_a_gradient_and_two_states_to_each_trainable_weight():
    model = tiny_model()
    assert training_bytes(model, CPU, DeviceFractions()) == 12 * sum(p.numel() for p in model.parameters())
    model.model.layers.requires_grad_(False)
    assert training_bytes(model, CPU, DeviceFractions()) == 12 * (13 * 32 + 32)  # the tied embedding and the last norm


def test_what_is_cut_over_ranks_or_kept_on_the_host_is_counted_as_such():
    model = tiny_model()
    numbers = sum(p.numel() for p in model.parameters())
    assert training_bytes(model, CPU, DeviceFractions(1 / 8, 1 / 8, 1 / 8)) == 12 * numbers // 8
    assert training_bytes(model, CPU, DeviceFractions(1.0, 1.0, 0.0)) == 4 * numbers
    gpu = torch.device("cuda")  # the weights have yet to come there
    assert training_bytes(model, gpu, DeviceFractions(1 / 8, 1 / 8, 1 / 8)) == 16 * numbers // 8
    assert training_bytes(model, gpu, DeviceFractions(0.0, 0.0, 0.0)) == 0
    model.requires_grad_(False)
    assert training_bytes(model, gpu, DeviceFractions(1 / 2, 1 / 2, 1 / 2)) == 2 * numbers


def test_what_gradients_and_states_will_take_is_not_given_to_caches():
    model = tiny_model()
    alone = sizes(model).kv_cache_bytes
    # Nine tenths of what is free, without taking any of it: one number, expanded.
    model.large = torch.nn.Parameter(torch.empty(1).expand(free_bytes("cpu") * 9 // 10 // 12))
    assert sizes(model).kv_cache_bytes <= alone // 4
    assert sizes(model, kv_cache_bytes=alone).kv_cache_bytes == alone
