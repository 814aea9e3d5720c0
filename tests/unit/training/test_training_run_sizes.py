"""Sizes left to `auto` follow the memory that training leaves: the largest powers of two that keep to their share of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Gemma3nTextConfig, Qwen2Config

from lowpeak.arguments.base import MemorySettings
from lowpeak.memory.device_memory import free_bytes
from lowpeak.parallel.detect import DeviceFractions
from lowpeak.ranks import Ranks
from lowpeak.sizes.run_sizes import (
    ModelShape,
    Sizes,
    auto_chunk_tokens,
    auto_kv_cache_bytes,
    auto_micro_batch_tokens,
    choose_layout,
    training_bytes,
)
from tiny_models import tiny_model

GIB = 1 << 30
SHAPE = ModelShape(hidden=1024, layers=24, intermediate=4096, vocab=150_000, itemsize=2, stream=2)


def test_a_shape_is_read_from_a_config():
    config = Qwen2Config(hidden_size=64, num_hidden_layers=3, intermediate_size=96, vocab_size=11)
    assert ModelShape.of(config, 2) == ModelShape(64, 3, 96, 11, 2, 2)
    assert ModelShape.of(config, 2, 4) == ModelShape(64, 3, 96, 11, 2, 4)
    by_layer = Gemma3nTextConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=[32, 96], vocab_size=11)
    assert ModelShape.of(by_layer, 2).intermediate == 96


@pytest.mark.parametrize("gibibytes", [3, 8, 21, 30])
def test_a_chunks_logits_keep_to_a_sixty_fourth_and_nearly_fill_it(gibibytes):
    taken = 4 * SHAPE.vocab * auto_chunk_tokens(SHAPE, gibibytes * GIB)
    assert gibibytes * GIB / 128 < taken <= gibibytes * GIB / 64


def test_a_chunk_and_the_heads_gradient_are_an_eighth_of_what_all_logits_take():
    tokens, free = 4096, 16 * GIB
    gradient, logits = 4 * SHAPE.vocab * SHAPE.hidden, 4 * SHAPE.vocab * tokens
    naive = 3 * logits  # logits, log-softmax, its gradient
    assert gradient + 4 * SHAPE.vocab * auto_chunk_tokens(SHAPE, free) <= naive / 8


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_micro_batchs_activations_keep_to_a_quarter_and_nearly_fill_it(checkpointing):
    layer = 2 * (17 * 1024 + 3 * 4096)
    per_token = 24 * 2 * 1024 + layer if checkpointing else 24 * layer
    taken = per_token * auto_micro_batch_tokens(SHAPE, 8 * GIB, checkpointing)
    assert GIB < taken <= 2 * GIB


def test_layer_inputs_have_the_embeddings_dtype():
    wide = replace(SHAPE, layers=100, stream=4)
    assert auto_micro_batch_tokens(wide, 8 * GIB, True) == auto_micro_batch_tokens(
        replace(wide, stream=2), 4 * GIB + GIB // 2, True
    )


def test_a_cache_is_a_quarter_rounded_down_and_without_free_memory_the_least_sizes_remain():
    assert auto_kv_cache_bytes(10 * GIB) == 2 * GIB
    assert (auto_chunk_tokens(SHAPE, 0), auto_micro_batch_tokens(SHAPE, 0, True), auto_kv_cache_bytes(0)) == (
        16,
        512,
        1 << 24,
    )


CPU = torch.device("cpu")


def sizes(model: torch.nn.Module, **arguments: int) -> Sizes:
    settings = MemorySettings(**arguments)
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
