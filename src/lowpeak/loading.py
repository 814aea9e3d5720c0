"""Which ranks read a model's weights from disk, and what of them: each its part of a model that is cut over tensors.

With FSDP's efficient loading rank 0 alone reads, and hands weights out. The other ranks make the model without weights (on the
meta device), so that a host never holds a copy for each of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lowpeak.config.asked import Cut
from lowpeak.errors import ArgumentError, MissingPackageError
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


# A norm of single heads (Qwen3): every peer has all of its weight, and the gradient from its own heads.
IN_PARTS = "replicated_with_grad_allreduce"
_STYLES = ("colwise", "rowwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise", IN_PARTS)


def in_parts(auto: Any, name: str, options: Mapping[str, Any], cut: Cut) -> Any:
    """The model that `auto.from_pretrained(name, **options)` gives, cut by transformers: each process reads its part alone.

    ArgumentError for a model whose plan does what was not tried here. The model is then told that nobody has cut it:
    transformers' Trainer else saves no states, and averages gradients in its own way. Hooks that add up a gradient over peers
    go: they do so after each micro-batch, with the sums of those before in it (transformers 5.23); the strategy does it once.
    """
    from transformers.distributed import DistributedConfig

    if not _cuts_both_ways():
        raise MissingPackageError("tensor parallelism needs transformers 5.23 or later.")
    sizes = DistributedConfig(tp_size=cut.tensor, fsdp_size=cut.data)
    model = auto.from_pretrained(name, **options, distributed_config=sizes)
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
    return model


def _cuts_both_ways() -> bool:
    """Whether transformers itself cuts over tensors and data ranks together: accelerate's way needs one of its older names."""
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "is_distributed_loading_by_transformers")


def _check_heads(model: Any, cut: Cut) -> None:
    """ArgumentError where peers would get parts of a head."""
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
    """The modules to which a model's tensor parallel plan gives this style."""
    for name, module in model.named_modules():
        if model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) == style:
            yield module
