"""What a KV cache takes: bytes per token, from the model's config."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowpeak.errors import EngineError


def bytes_per_token(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes that one token's keys and values take over all layers: `layers x KV heads x (key + value width) x dtype`.

    `dtype` is what they are stored in; where it is None the parameters', though two bytes at least: of 8-bit ones keys
    and values are wider, under autocast they are narrower.

    Where a config does not name its KV heads or their width, they are the attention heads and hidden size over heads;
    without attention heads (recurrent models) it is keys and values of the hidden size.
    """
    config = text_config(model)
    hidden = _attribute(config, "hidden_size")
    layers = _attribute(config, "num_hidden_layers")
    if hidden is None or layers is None:
        raise EngineError(
            f"{type(config).__name__} does not say hidden_size and num_hidden_layers, so the memory of its KV cache "
            "is unknown: generate with vLLM (use_vllm=True)."
        )
    heads = _attribute(config, "num_attention_heads") or 1
    kv_heads = _attribute(config, "num_key_value_heads") or heads
    itemsize = dtype.itemsize if dtype is not None else max(2, parameter_dtype(model).itemsize)
    return layers * kv_heads * _key_and_value_width(config, hidden // heads) * itemsize


def _key_and_value_width(config: Any, width: int) -> int:
    """Numbers in one head's key and value together; `width` in each where the config does not name them."""
    width = _attribute(config, "head_dim") or width
    latent = (_attribute(config, "qk_nope_head_dim") or 0) + (_attribute(config, "qk_rope_head_dim") or 0)
    return (latent or width) + (_attribute(config, "v_head_dim") or width)


def text_config(model: nn.Module) -> Any:
    """The config of the part of the model that writes text."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def _attribute(config: Any, name: str) -> int | None:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' answer where layers differ in it: the largest bounds them all
        return max((getattr(layer, name, None) or 0 for layer in config.per_layer_config), default=None)


def parameter_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter: a quantized model's others are packed integers."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
