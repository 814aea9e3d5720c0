"""Automatic sizes: `auto` resolved from free memory and the model's shape.

Sizes are rounded down to powers of two. Free memory varies a little from run to run, and different sizes would round sums
differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CHUNK_SHARE = 64
_ACTIVATION_SHARE = 4
_CACHE_SHARE = 4
# Korthikanti et al. 2022, eq. 2, without the attention scores: bytes per token and hidden unit, at 2 bytes a number.
_LAYER_FACTOR = 34


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that its memory depends on.

    `itemsize` is the bytes of an activation, `stream` those of the residual stream: under autocast that keeps the embeddings'
    wider dtype.
    """

    hidden: int
    layers: int
    intermediate: int
    vocab: int
    itemsize: int
    stream: int

    @classmethod
    def of(cls, config: Any, itemsize: int, stream: int | None = None) -> ModelShape:
        """Return the shape in a transformers config; of a multimodal model that of the text part."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        hidden = text.hidden_size
        intermediate = getattr(text, "intermediate_size", None) or 4 * hidden
        return cls(hidden, text.num_hidden_layers, intermediate, text.vocab_size, itemsize, stream or itemsize)


def auto_chunk_tokens(shape: ModelShape, free_bytes: int) -> int:
    """Return the number of tokens whose fp32 logits take at most 1/64 of free memory: 16 to 1,024.

    Example: 256 with 16 GB and a vocabulary of 152,000. Together with the gradient of a head 1,024 wide that is below an eighth
    of all logits of 4,096 tokens with their gradients.
    """
    return _power_of_two(free_bytes // _CHUNK_SHARE // (4 * shape.vocab), 16, 1024)


def auto_micro_batch_tokens(shape: ModelShape, free_bytes: int, checkpointing: bool) -> int:
    """Return the number of tokens whose activations take at most 1/4 of free memory: 512 to 65,536.

    A layer keeps 34 bytes per token and hidden unit in half precision (more with a wide MLP). With activation checkpointing
    each layer keeps only its input, and one layer at a time keeps everything.
    """
    per_layer = shape.itemsize * (_LAYER_FACTOR // 2 * shape.hidden + 3 * shape.intermediate)
    layer_input = shape.stream * shape.hidden
    per_token = shape.layers * layer_input + per_layer if checkpointing else shape.layers * per_layer
    return _power_of_two(free_bytes // _ACTIVATION_SHARE // per_token, 512, 65536)


def auto_kv_cache_bytes(free_bytes: int) -> int:
    """Return the bytes of the engine's KV cache: 1/4 of free memory."""
    return _power_of_two(free_bytes // _CACHE_SHARE, 1 << 24, 1 << 46)


def _power_of_two(value: int, least: int, most: int) -> int:
    return min(most, max(least, 1 << max(0, value.bit_length() - 1)))
