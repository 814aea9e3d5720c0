"""Which ranks read a model's weights from disk: with FSDP's efficient loading rank 0 alone, and it hands them out.

The other ranks make the model without weights (on the meta device), so that a host never holds a copy for each of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowpeak.ranks import Ranks

_ASKED = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def reads_weights() -> bool:
    """Whether this rank reads weights itself."""
    efficient = all(os.environ.get(name, "false").lower() in ("true", "1") for name in _ASKED)
    return not efficient or Ranks().rank == 0


def without_weights(auto: Any, name: str, options: Mapping[str, Any]) -> Any:
    """The model that `auto.from_pretrained(name, **options)` gives, its parameters on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    own = ("config", "dtype", "attn_implementation")
    config = options.get("config")
    if config is None:
        config = AutoConfig.from_pretrained(name, **{key: value for key, value in options.items() if key not in own})
    dtype = options.get("dtype", "auto")
    kept = {key: options[key] for key in ("attn_implementation", "trust_remote_code") if key in options}
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, dtype=config.dtype if dtype == "auto" else dtype, **kept)
    model.tie_weights()  # making parameters one by one has cut the ties
    model.name_or_path = name
    return model.eval()


def give_room(module: nn.Module) -> None:
    """Room in host memory, which nobody has touched yet, for parameters on the meta device; for a tied one once.

    Whoever hands out rank 0's weights finds an optimizer's parameters by where they lie.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if type(parameter) is nn.Parameter and parameter.is_meta:  # not one that is cut already
                real = torch.empty_like(parameter, device="cpu")
                made.setdefault(id(parameter), nn.Parameter(real, requires_grad=parameter.requires_grad))
                part._parameters[name] = made[id(parameter)]
