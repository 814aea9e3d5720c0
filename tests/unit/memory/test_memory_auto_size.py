"""What `auto` resolves to: the largest power of two whose bytes keep to their share of free memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import Qwen2Config

from lowpeak.memory import ModelShape, auto_chunk_tokens, auto_kv_cache_bytes, auto_micro_batch_tokens

GIB = 1 << 30
SHAPE = ModelShape(hidden=1024, layers=24, intermediate=4096, vocab=150_000, itemsize=2, stream=2)


def test_a_shape_is_read_from_a_config():
    config = Qwen2Config(hidden_size=64, num_hidden_layers=3, intermediate_size=96, vocab_size=11)
    assert ModelShape.of(config, 2) == ModelShape(64, 3, 96, 11, 2, 2)
    assert ModelShape.of(config, 2, 4) == ModelShape(64, 3, 96, 11, 2, 4)


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
