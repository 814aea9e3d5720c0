"""Sizes that `auto` resolves to, from free memory and the model's shape; rounded down to powers of two, so that two
runs on the same machine do the same sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CHUNK_SHARE = 64
_ACTIVATION_SHARE = 4
_CACHE_SHARE = 4
# Korthikanti et al. 2022, eq. 2, without the attention scores: bytes per token and hidden unit, at 2 bytes a number.
_LAYER_FACTOR = 34


@dataclass(frozen=True)
class Shape:
    """What sizes depend on: `hidden` D, `layers`, `intermediate`, `vocab` V, bytes of an activation and of a layer's input."""

    hidden: int
    layers: int
    intermediate: int
    vocab: int
    itemsize: int
    stream: int

    @classmethod
    def of(cls, config: Any, itemsize: int, stream: int | None = None) -> Shape:
        """Read off a transformers config; text part of a multimodal one.

        `stream` is what layers hand on, in the embeddings' dtype: under autocast wider than what they compute with.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        hidden = text.hidden_size
        intermediate = getattr(text, "intermediate_size", None) or 4 * hidden
        return cls(hidden, text.num_hidden_layers, intermediate, text.vocab_size, itemsize, stream or itemsize)


def fit_chunk(shape: Shape, free_bytes: int) -> int:
    """Tokens whose fp32 logits, one buffer, take at most 1/64 of free memory; 16 to 1,024.

    With 16 GB and a vocabulary of 152,000 that is 256: with the gradient of a head 1,024 wide under an eighth of what
    all logits of 4,096 tokens and their gradients take.
    """
    return _power_of_two(free_bytes // _CHUNK_SHARE // (4 * shape.vocab), 16, 1024)


def fit_micro_batch(shape: Shape, free_bytes: int, checkpointing: bool) -> int:
    """Tokens whose activations take at most 1/4 of free memory; 512 to 65,536.

    A layer keeps 34 bytes per token and hidden unit in half precision (more with a wide MLP); with activation
    checkpointing each layer keeps its input alone and one layer is alive whole.
    """
    per_layer = shape.itemsize * (_LAYER_FACTOR // 2 * shape.hidden + 3 * shape.intermediate)
    kept = shape.stream * shape.hidden
    per_token = shape.layers * kept + per_layer if checkpointing else shape.layers * per_layer
    return _power_of_two(free_bytes // _ACTIVATION_SHARE // per_token, 512, 65536)


def fit_kv_cache(free_bytes: int) -> int:
    """Bytes of the engine's KV cache: 1/4 of free memory."""
    return _power_of_two(free_bytes // _CACHE_SHARE, 1 << 24, 1 << 46)


def _power_of_two(value: int, least: int, most: int) -> int:
    return min(most, max(least, 1 << max(0, value.bit_length() - 1)))
