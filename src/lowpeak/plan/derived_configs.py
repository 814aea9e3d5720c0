"""Configs of a planned run with changes: other arguments, fewer layers, one device's part of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any


def shard_config(config: Any, tensor_parallel: int) -> Any:
    """Return the config of one process's part under tensor parallelism: its heads, its part of the MLP and of the vocabulary."""
    if tensor_parallel == 1:
        return config
    part = copy.deepcopy(config)
    text = part.get_text_config()
    heads = text.num_attention_heads
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    for name in (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "vocab_size",
    ):
        value = getattr(text, name, None)
        if isinstance(value, list):  # of each layer
            setattr(text, name, [max(1, -(-each // tensor_parallel)) for each in value])
        elif value is not None:
            setattr(text, name, max(1, -(-value // tensor_parallel)))
    return part


def with_arguments(args: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a trainer's config with other values of some arguments, as if they were given."""
    changed = copy.copy(args)
    for name, value in changes.items():
        setattr(changed, name, value)
        if name == "gradient_checkpointing" and hasattr(changed, "activation_checkpointing"):
            changed.activation_checkpointing = value  # transformers' newer name of it
    changed.given = frozenset(args.given) | frozenset(changes)
    return changed


def with_layers(config: Any, layers: Sequence[int]) -> Any:
    """Return the config of a model with some of its layers, by number."""
    fewer = copy.deepcopy(config)
    text = fewer.get_text_config()
    number = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == number:  # an entry for each layer, such as layer_types
            setattr(text, name, [value[i] for i in layers])
    text.num_hidden_layers = len(layers)
    return fewer
