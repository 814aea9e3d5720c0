"""Sharded loading: which ranks read a model's weights, which part, and into which memory; no host has a copy per rank.

If rank 0 alone reads the weights and broadcasts them (FSDP's efficient loading; frozen models on GPUs), the other ranks create
the model on the meta device. A policy that is not sharded is read directly into its device's memory. On CPUs all ranks read, and
weights in the file's dtype stay mapped: one copy in the page cache. Tensor parallelism is applied by transformers while it loads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as deepspeed_integration

from lowpeak.arguments import ModelParallel, is_switched_on
from lowpeak.errors import ArgumentError, MissingPackageError
from lowpeak.ranks import Ranks

DRY_RUN = ContextVar("DRY_RUN", default=False)
_EFFICIENT_LOADING = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def reads_weights(frozen_on: torch.device | None = None) -> bool:
    """Return whether this rank reads weights; `frozen_on` is the device of a frozen model, None for a trained model."""
    efficient = all(os.environ.get(name, "false").lower() in ("true", "1") for name in _EFFICIENT_LOADING)
    is_broadcast = efficient or (frozen_on is not None and _needs_device_copy(frozen_on))
    return not is_broadcast or Ranks().rank == 0


@contextmanager
def allow_missing_weights() -> Iterator[None]:
    """Load folders without weights as meta models inside the block: a dry run needs only sizes."""
    token = DRY_RUN.set(True)
    try:
        yield
    finally:
        DRY_RUN.reset(token)


@contextmanager
def make_whole_models() -> Iterator[None]:
    """Make models from configs inside the block without initialising weights, and whole: under ZeRO-3 transformers shards them."""
    reference = deepspeed_integration._hf_deepspeed_config_weak_ref
    deepspeed_integration._hf_deepspeed_config_weak_ref = None
    try:
        with no_init_weights():
            yield
    finally:
        deepspeed_integration._hf_deepspeed_config_weak_ref = reference


def is_weightless_folder(name: str) -> bool:
    """Return whether a model is a folder without weights inside of `allow_missing_weights`."""
    folder = Path(name)
    files = (file for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    return DRY_RUN.get() and folder.is_dir() and next(files, None) is None


def device_map_for_loading(device: torch.device | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `device_map` keyword that loads an unsharded policy directly onto its device.

    Empty on CPUs, under FSDP and DeepSpeed, and if a quantiser or the user's `device_map` places the model.
    """
    is_placed = (
        is_switched_on(os.environ, _EFFICIENT_LOADING[0]) or {"device_map", "quantization_config"} & options.keys()
    )
    return {} if device is None or is_placed or not _needs_device_copy(device) else {"device_map": {"": device}}


def _needs_device_copy(device: torch.device) -> bool:
    """Return whether weights must be copied from the host to the device here; ZeRO-3 does it while it loads."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    return device.type != "cpu" and not is_deepspeed_zero3_enabled()


def gather_zero3_params(*parameters: nn.Parameter) -> AbstractContextManager[Any]:
    """Gather, for a block, parameters that ZeRO-3 sharded when they were created; rank 0's changes to them are kept."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)


def init_without_weights(auto: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the model of `auto.from_pretrained(name, **options)` with its parameters on the meta device.

    A quantised checkpoint is read nevertheless, since its quantiser places it on the device while it is loaded.
    """
    from accelerate import init_empty_weights
    from transformers import GenerationConfig

    config = find_config(name, options)
    if getattr(config, "quantization_config", None) is not None:
        return auto.from_pretrained(name, **options)
    dtype = options.get("dtype", "auto")
    model_options = {key: options[key] for key in ("attn_implementation", "trust_remote_code") if key in options}
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, dtype=config.dtype if dtype == "auto" else dtype, **model_options)
    model.tie_weights()  # creating the parameters one by one has untied them
    model.name_or_path = name
    if model.can_generate():
        # Generation ends at this file's tokens, on all ranks alike; a model may lack the file.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(name, **_file_options(options))
    return model.eval()


def auto_class(auto: Any, config: Any) -> Any:
    """Return the auto class itself, or for causal LMs of images and text, which have no other, their own."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    is_causal = auto is not AutoModelForCausalLM or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return (
        auto if is_causal or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForImageTextToText
    )


def find_config(name: str, options: Mapping[str, Any]) -> Any:
    """Return the config with which `from_pretrained(name, **options)` creates a model."""
    from transformers import AutoConfig

    return options.get("config") or AutoConfig.from_pretrained(name, **_file_options(options))


def _file_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that say where a model's files are."""
    of_model = ("config", "dtype", "attn_implementation", "quantization_config", "device_map")
    return {key: value for key, value in options.items() if key not in of_model}


def materialize_meta_params(module: nn.Module, device: torch.device | str = "cpu") -> None:
    """Allocate uninitialised memory for parameters on the meta device; a tied parameter is allocated once."""
    # Needed before FSDP broadcasts rank 0's weights: accelerate matches the optimizer's parameters by their data pointers.
    allocated: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if type(parameter) is nn.Parameter and parameter.is_meta:  # not a sharded one
                real = torch.empty_like(parameter, device=device)
                allocated.setdefault(id(parameter), nn.Parameter(real, requires_grad=parameter.requires_grad))
                part._parameters[name] = allocated[id(parameter)]


# A norm per head (Qwen3): each process of a TP group has the whole weight, and the gradient from its heads alone.
GRAD_ALLREDUCE_STYLE = "replicated_with_grad_allreduce"
# Modules of these styles end in a collective of the TP group.
COLLECTIVE_STYLES = ("rowwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise")
_SUPPORTED_STYLES = ("colwise", *COLLECTIVE_STYLES, GRAD_ALLREDUCE_STYLE)


def load_tensor_parallel(auto: Any, name: str, options: Mapping[str, Any], model_parallel: ModelParallel) -> Any:
    """Return the model of `auto.from_pretrained(name, **options)`, sharded by transformers, and its loading report.

    Each process reads only its part. Raises ArgumentError for a model whose plan has styles that lowpeak does not support.
    """
    require_tensor_parallel()
    from transformers.distributed import DistributedConfig

    sizes = DistributedConfig(tp_size=model_parallel.tensor, fsdp_size=model_parallel.data)
    model, report = auto.from_pretrained(name, **options, distributed_config=sizes)
    check_tensor_parallel(model, model_parallel)
    disable_transformers_hooks(model)
    return model, report


def require_tensor_parallel() -> None:
    """Raise MissingPackageError unless transformers splits models as lowpeak expects it."""
    from transformers import PreTrainedModel

    # accelerate needs this older name of transformers to combine tensor parallelism with FSDP2.
    if not hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"):
        raise MissingPackageError("tensor parallelism needs transformers 5.23 or later.")


def disable_transformers_hooks(model: Any) -> None:
    """Remove hooks and flags with which transformers would average a split model's gradients itself."""
    # Otherwise transformers' Trainer saves no optimizer states, and averages gradients in a different way.
    model._is_distributed_loading_by_transformers = False
    # Hooks that all-reduce a gradient after each micro-batch, together with sums of earlier ones (transformers 5.23); the
    # strategy reduces once per step.
    for module in modules_with_style(model, GRAD_ALLREDUCE_STYLE):
        module.__dict__.pop("forward", None)


def refuse_adapter_under_tp(peft_config: Any, is_quantised: bool) -> None:
    """Raise ArgumentError for an adapter or a quantised model, which tensor parallelism does not support."""
    if peft_config is not None or is_quantised:
        raise ArgumentError(
            "tensor parallelism does not support adapters and quantised models: train them under fsdp2 or zero3."
        )


def check_tensor_parallel(model: Any, model_parallel: ModelParallel) -> None:
    """Raise ArgumentError for a model whose plan, heads or tied embedding these sizes cannot split."""
    unknown = sorted(set(model.tp_plan.values()) - set(_SUPPORTED_STYLES))
    if unknown or not model.tp_plan:
        raise ArgumentError(
            f"the tensor parallel plan of {type(model).__name__} has {', '.join(unknown) or 'no modules'}, which lowpeak does not "
            "support: use fsdp2 or zero3."
        )
    _check_heads(model, model_parallel)
    _check_tied_embedding(model, model_parallel)


def _check_heads(model: Any, model_parallel: ModelParallel) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % model_parallel.tensor:
            raise ArgumentError(
                f"the model has {name}={heads}, which tp_size={model_parallel.tensor} does not divide: lower tp_size."
            )


def _check_tied_embedding(model: Any, model_parallel: ModelParallel) -> None:
    """Raise ArgumentError if FSDP2 would pad, and so untie, the two uses of a tied weight."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    tensor, data, num_rows = model_parallel.tensor, model_parallel.data, table.weight.shape[0]
    if tied and data > 1 and num_rows % (tensor * data):
        raise ArgumentError(
            f"the tied embedding has {num_rows} rows, which {tensor} x {data} processes do not divide: head and embedding would "
            "become different weights. Use other sizes, tensor parallelism alone, or fsdp2."
        )


def modules_with_style(model: Any, style: str) -> Iterator[nn.Module]:
    """Yield the modules to which a model's tensor parallel plan gives this style."""
    for name, module in model.named_modules():
        if model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) == style:
            yield module
