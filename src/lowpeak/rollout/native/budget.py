"""What a KV cache takes: bytes per token from the model's config, and the bytes there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowpeak.errors import EngineError

_SHARE = 4  # an automatic budget is one part in four of what is free
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def bytes_per_token(model: nn.Module) -> int:
    """Bytes that one token's keys and values take over all layers: `layers x KV heads x (key + value width) x dtype`.

    Where a config does not name its KV heads or their width, they are the attention heads and hidden size over heads;
    without attention heads (recurrent models) it is keys and values of the hidden size.
    """
    config = text_config(model)
    hidden = _attribute(config, "hidden_size")
    layers = _attribute(config, "num_hidden_layers")
    if hidden is None or layers is None:
        raise EngineError(
            f"{type(config).__name__} does not say hidden_size and num_hidden_layers, so the memory of its KV cache "
            "is unknown: use another engine for this model."
        )
    heads = _attribute(config, "num_attention_heads") or 1
    kv_heads = _attribute(config, "num_key_value_heads") or heads
    width = _attribute(config, "head_dim") or hidden // heads
    latent = (_attribute(config, "qk_nope_head_dim") or 0) + (_attribute(config, "qk_rope_head_dim") or 0)
    keys_and_values = (latent or width) + (_attribute(config, "v_head_dim") or width)
    return layers * kv_heads * keys_and_values * _dtype(model).itemsize


def text_config(model: nn.Module) -> Any:
    """The config of the part of the model that writes text."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def _attribute(config: Any, name: str) -> int | None:
    """A number of the config, None where it is missing."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' answer where layers differ in it: the largest bounds them all
        return max((getattr(layer, name, None) or 0 for layer in config.per_layer_config), default=None)


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter: a quantized model's others are packed integers."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def automatic_budget(device: torch.device) -> int:
    """A quarter of the memory that is free on `device`, or of the RAM this process may still use, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch's allocator holds without using it is free to the cache as well.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + idle) // _SHARE
    return _available_ram() // _SHARE


def _available_ram() -> int:
    """RAM that is available, and no more than the control group's limit leaves."""
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    if _MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        amounts = [int(fields["MemAvailable"].split()[0]) * 1024]
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        amounts.append(max(0, int(text) - int(used.read_text())))
    return min(amounts)
