"""Which ranks read a model's weights from disk, what of them, and into which memory: no host holds a copy for each of its ranks.

Where rank 0 alone reads and hands weights out (FSDP's efficient loading; frozen models for devices with memory of their own), the
other ranks make the model without weights, on the meta device. A policy that trains whole is read into its device's memory. On
CPUs all ranks read, and what keeps the file's dtype is the file itself, mapped: one copy in the system's cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lowpeak.arguments import Cut, is_on
from lowpeak.errors import ArgumentError, MissingPackageError
from lowpeak.ranks import Ranks

_ASKED = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def reads_weights(frozen_on: torch.device | None = None) -> bool:
    """Whether this rank reads weights itself; `frozen_on` is the device of a model that will not train, None for one that will."""
    efficient = all(os.environ.get(name, "false").lower() in ("true", "1") for name in _ASKED)
    handed_out = efficient or (frozen_on is not None and _apart(frozen_on))
    return not handed_out or Ranks().rank == 0


def straight_to(device: torch.device | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return more keywords of `from_pretrained`: a policy that trains whole is read into its device's memory, a tensor at a time.

    None where that memory is the host's, and where FSDP or DeepSpeed will cut the model or a quantiser places it.
    """
    placed_else = is_on(os.environ, _ASKED[0]) or {"device_map", "quantization_config"} & options.keys()
    return {} if device is None or placed_else or not _apart(device) else {"device_map": {"": device}}


def _apart(device: torch.device) -> bool:
    """Whether weights have to be moved from the host to the device, and by us: ZeRO-3 does so while it loads."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    return device.type != "cpu" and not is_deepspeed_zero3_enabled()


def whole_again(*parameters: nn.Parameter) -> AbstractContextManager[Any]:
    """Gather parameters that ZeRO-3 cut as they were made, for a block; what rank 0 writes into them stays."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)


def without_weights(auto: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the model that `auto.from_pretrained(name, **options)` gives, its parameters on the meta device.

    A checkpoint that is quantised is read after all: its quantiser has put it on the device when it is loaded.
    """
    from accelerate import init_empty_weights

    config = find_config(name, options)
    if getattr(config, "quantization_config", None) is not None:
        return auto.from_pretrained(name, **options)
    dtype = options.get("dtype", "auto")
    kept = {key: options[key] for key in ("attn_implementation", "trust_remote_code") if key in options}
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, dtype=config.dtype if dtype == "auto" else dtype, **kept)
    model.tie_weights()  # making parameters one by one has cut the ties
    model.name_or_path = name
    return model.eval()


def find_config(name: str, options: Mapping[str, Any]) -> Any:
    """Return the config with which `from_pretrained(name, **options)` makes a model."""
    from transformers import AutoConfig

    own = ("config", "dtype", "attn_implementation", "quantization_config", "device_map")
    given = options.get("config")
    return given or AutoConfig.from_pretrained(name, **{key: options[key] for key in options if key not in own})


def give_room(module: nn.Module, device: torch.device | str = "cpu") -> None:
    """Make room in a device's memory, untouched, for parameters on the meta device; for a tied one once.

    Whoever hands out rank 0's weights finds an optimizer's parameters by where they lie.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if type(parameter) is nn.Parameter and parameter.is_meta:  # not one that is cut already
                real = torch.empty_like(parameter, device=device)
                made.setdefault(id(parameter), nn.Parameter(real, requires_grad=parameter.requires_grad))
                part._parameters[name] = made[id(parameter)]


# A norm of single heads (Qwen3): every peer has all of its weight, and the gradient from its own heads.
IN_PARTS = "replicated_with_grad_allreduce"
MEETING = ("rowwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise")  # end in a collective of peers
_STYLES = ("colwise", *MEETING, IN_PARTS)


def in_parts(auto: Any, name: str, options: Mapping[str, Any], cut: Cut) -> Any:
    """Return what `auto.from_pretrained(name, **options)` gives with its report, cut by transformers.

    Each process reads its part alone.

    ArgumentError for a model whose plan does what was not tried here. The model is then told that nobody has cut it:
    transformers' Trainer else saves no states, and averages gradients in its own way. Hooks that add up a gradient over peers
    go: they do so after each micro-batch, with the sums of those before in it (transformers 5.23); the strategy does it once.
    """
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig

    # Accelerate's way of cutting over tensors and data ranks together needs one of transformers' older names.
    if not hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"):
        raise MissingPackageError("tensor parallelism needs transformers 5.23 or later.")
    sizes = DistributedConfig(tp_size=cut.tensor, fsdp_size=cut.data)
    model, report = auto.from_pretrained(name, **options, distributed_config=sizes)
    unknown = sorted(set(model.tp_plan.values()) - set(_STYLES))
    if unknown:
        raise ArgumentError(
            f"the tensor parallel plan of {type(model).__name__} has {', '.join(unknown)}, with which lowpeak was not tried: "
            "use fsdp2 or zero3."
        )
    _check_heads(model, cut)
    _check_tied(model, cut)
    model._is_distributed_loading_by_transformers = False
    for module in styled(model, IN_PARTS):
        module.__dict__.pop("forward", None)
    return model, report


def _check_heads(model: Any, cut: Cut) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % cut.tensor:
            raise ArgumentError(
                f"the model has {name}={heads}, which tp_size={cut.tensor} does not divide: lower tp_size."
            )


def _check_tied(model: Any, cut: Cut) -> None:
    """ArgumentError where FSDP2 would keep two copies of a tied weight, one for each of its places, and pad each by itself."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    if tied and cut.data > 1 and table.weight.shape[0] % (cut.tensor * cut.data):
        raise ArgumentError(
            f"the tied embedding has {table.weight.shape[0]} rows, which {cut.tensor} x {cut.data} processes do not divide: head "
            "and embedding would become different weights. Use other sizes, tensor parallelism alone, or fsdp2."
        )


def styled(model: Any, style: str) -> Iterator[nn.Module]:
    """Yield the modules to which a model's tensor parallel plan gives this style."""
    for name, module in model.named_modules():
        if model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) == style:
            yield module
