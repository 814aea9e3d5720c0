"""Loading of the policy, its tokenizer and the reference, and the precision of their weights.

Trainable weights are fp32 from loading on (logged once), with bf16 computation if the user sets it. They are bf16 if the user asks
for that dtype or for a storage format with it. Frozen weights, and the base under LoRA, keep the checkpoint's dtype; adapters are
fp32.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lowpeak.arguments import NOT_PARALLEL, ModelParallel, ModelSettings
from lowpeak.data import check_tokenizer
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.heads import (
    install_head,
    install_score_head,
    is_peft,
    remove_critic,
    transformers_model,
    verify_head,
    verify_score_head,
)
from lowpeak.models.lora import add_training_adapter, remove_added_modules, ties_lora_weights, warn_of_frozen_experts
from lowpeak.models.pretrained import from_pretrained
from lowpeak.models.sharded_loading import device_map_for_loading, find_config, refuse_adapter_under_tp

logger = logging.getLogger(__name__)

_ROUNDED = "%s are rounded to bf16: the bits beside them, if the format has any, start at 0."
_AS_SAVED = ModelSettings()


def load_policy(
    model: str | nn.Module,
    settings: ModelSettings = _AS_SAVED,
    *,
    peft_config: Any = None,
    model_parallel: ModelParallel = NOT_PARALLEL,
    device: torch.device | None = None,
) -> nn.Module:
    """Return the model to train, from a name, path or instance; under a new adapter if `peft_config` is given.

    A tensor parallel model is loaded in its training dtype; see `convert_trainable` for the others. A model that will not be
    sharded is read directly into the memory of its `device`.
    """
    if model_parallel != NOT_PARALLEL:
        _check_tensor_parallel(model, settings, peft_config)
    if isinstance(model, str) and peft_config is not None:
        settings = settings.of_base()
    policy = _load_or_take(model, settings, model_parallel, device)
    _keep_training_format(policy)
    if peft_config is not None:
        policy = add_training_adapter(policy, peft_config)
        warn_of_frozen_experts(policy)
    elif getattr(policy, "is_quantized", False) and not is_peft(policy):
        raise ArgumentError("a quantised model trains through an adapter: pass peft_config=LoraConfig(...).")
    freeze_other_modalities(policy)
    _check_policy(policy)
    return policy


def _load_or_take(
    model: str | nn.Module, settings: ModelSettings, model_parallel: ModelParallel, device: torch.device | None
) -> nn.Module:
    if isinstance(model, str):
        alone = model_parallel == NOT_PARALLEL
        sharded = {} if settings.trains_bf16 else {"dtype": torch.float32}
        changes = device_map_for_loading(device, settings.model_init_kwargs) if alone else sharded
        policy = _load_causal(model, settings, model_parallel, **changes)
        log_rounding(model, policy, settings)
        return policy
    _check_instance(model, bool(settings.model_init_kwargs) or settings.trust_remote_code)
    remove_added_modules(model)
    return model


def log_rounding(name: str, policy: nn.Module, settings: ModelSettings) -> None:
    """Log that a checkpoint in fp32 was rounded while it was loaded."""
    if settings.trains_bf16 and policy.dtype == torch.bfloat16:
        in_file = find_config(name, settings.load_kwargs).dtype
        if in_file == torch.float32:
            logger.info(_ROUNDED, f"the fp32 weights of {name!r}")


def _check_instance(model: nn.Module, has_load_arguments: bool) -> None:
    if has_load_arguments:
        raise ArgumentError(
            "model_init_kwargs and trust_remote_code have an effect only on a model by name or path, and model is an instance: "
            "remove them."
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model must be a name or a path as text, or a torch module, got {model!r:.80} of type {type(model).__name__}."
        )


def _load_causal(
    name: str,
    settings: ModelSettings,
    model_parallel: ModelParallel,
    frozen_on: torch.device | None = None,
    **changes: Any,
) -> nn.Module:
    return from_pretrained(AutoModelForCausalLM, name, model_parallel, frozen_on, **settings.load_kwargs | changes)


def _check_tensor_parallel(model: Any, settings: ModelSettings, peft_config: Any) -> None:
    if not isinstance(model, str):
        raise ArgumentError(
            "tensor parallelism shards a model while it is loaded: pass its name or path, not an instance."
        )
    refuse_adapter_under_tp(peft_config, "quantization_config" in settings.model_init_kwargs)


def freeze_other_modalities(policy: nn.Module) -> None:
    """Freeze a model's parts for images and sound, which training on text leaves without gradients."""
    model = transformers_model(policy)
    if model.config.get_text_config() is model.config:
        return
    text_parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    head = getattr(model, "score", None)  # of a classifier
    kept = {id(parameter) for part in filter(None, (*text_parts, head)) for parameter in part.parameters()}
    other = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
    for parameter in other:
        parameter.requires_grad_(False)
    if other:
        count = sum(parameter.numel() for parameter in other)
        logger.info("%s trains on text alone: %d parameters of other inputs are frozen.", type(model).__name__, count)


def _check_policy(policy: nn.Module) -> None:
    """Raise an error for a policy whose training would silently fail or have no effect."""
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        config = transformers_model(policy).config
        if is_peft(policy) and config.get_text_config() is not config:
            raise ArgumentError(
                "the adapter has no trainable part in the text model, and images and sound are not trained: choose other "
                "target_modules, such as 'all-linear'."
            )
        raise ModelError(
            "the model has no trainable weights, so training would change nothing: call requires_grad_(True) on the weights to "
            "train, or load the adapter with PeftModel.from_pretrained(..., is_trainable=True)."
        )
    if ties_lora_weights(policy):
        raise ArgumentError(
            "ensure_weight_tying=True makes two LoRA parameters of a tied embedding and head share memory, so an optimizer would "
            "update it twice: move the embedding from target_modules to modules_to_save, or remove ensure_weight_tying."
        )


def load_tokenizer(processing_class: Any, model: str | nn.Module, trust_remote_code: bool) -> Any:
    """Return the tokenizer passed in, or the model's; ModelError if it cannot be used (see `check_tokenizer`)."""
    if processing_class is not None:
        check_tokenizer(processing_class)
        return processing_class
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name:
        raise ArgumentError(
            "the model instance has no name or path to load a tokenizer from: pass processing_class=tokenizer."
        )
    tokenizer = from_pretrained(AutoTokenizer, name, trust_remote_code=trust_remote_code)
    # transformers returns a tokenizer with special tokens alone if there are no files.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ModelError(f"{name!r} has no tokenizer: save one there, or pass processing_class=tokenizer.")
    check_tokenizer(tokenizer)
    return tokenizer


def load_reference(
    policy: nn.Module,
    origin: str | nn.Module,
    settings: ModelSettings = _AS_SAVED,
    ref_model: str | nn.Module | None = None,
    *,
    model_parallel: ModelParallel = NOT_PARALLEL,
    device: torch.device | None = None,
) -> nn.Module | None:
    """Return the frozen reference as a separate model, for a `device`; None under LoRA (see `adapter_reference`).

    `origin` is the user's model argument: a name is loaded again in the checkpoint's dtype, an instance is copied before training
    changes it. A `ref_model` replaces it; an instance is used without a copy.
    """
    if isinstance(ref_model, nn.Module):
        if ref_model is origin:
            raise ArgumentError("ref_model is the model itself, which training changes: remove it.")
        return ref_model
    if ref_model is not None:
        return _load_causal(ref_model, settings, model_parallel, device)
    if is_peft(policy):
        return None
    if isinstance(origin, str):
        return _load_causal(origin, settings, model_parallel, device)
    if any(hasattr(parameter, "ds_id") for parameter in policy.parameters()):
        raise ArgumentError(
            "the reference is a copy of the model, and one that was made after a config with ZeRO-3 is split already: pass the "
            "model's name or path, or a ref_model, or make the model before the config."
        )
    reference = copy.deepcopy(policy)
    remove_critic(reference)
    return reference


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: of dropout modules, and of modules that store it as an attribute or in their config.

    Adapters keep the dropout of their config. Routers that add noise or choose experts at random in training (Mixtral with
    jitter, PhiMoE) compute as in evaluation.
    """
    rates = [0.0]
    for path, module in model.named_modules():
        if "lora_dropout" in path:
            continue
        rates += _clear_config_rates(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or name in ("layerdrop", *_rate_names(module))):
                rates.append(value)
                setattr(module, name, 0.0)
            elif "jitter" in name:
                module.train = MethodType(_train_children, module)
                module.train(module.training)
    if max(rates) > 0:
        logger.info(
            "Dropout of %s, up to %s, is off; disable_dropout=False keeps it.", type(model).__name__, max(rates)
        )


def _clear_config_rates(module: Any) -> list[float]:
    """Set to 0 the rates that a layer reads from its config; return them."""
    kind: Any = type(module)
    rates = {name: float(getattr(module.config, name)) for name in _rates_of_config(kind)}
    if any(rates.values()):
        # The model's own config stays: it is saved.
        module.config = copy.copy(module.config)
        vars(module.config).update(dict.fromkeys(rates, 0.0))
    return list(rates.values())


@functools.cache
def _rates_of_config(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the dropout rates that a layer's forward reads from its config, as Falcon's does."""
    if not kind.__module__.startswith("transformers") or issubclass(kind, PreTrainedModel):
        return ()
    return tuple(set(re.findall(r"self\.config\.(\w*dropout)\b", inspect.getsource(kind.forward))))


def _rate_names(module: nn.Module) -> tuple[str, ...]:
    return ("p",) if isinstance(module, _DropoutNd) else ()


def _train_children(module: nn.Module, mode: bool = True) -> nn.Module:
    """Set the mode of a module's children, and keep the module itself in eval mode."""
    nn.Module.train(module, mode).training = False
    return module


def context_length(model: nn.Module) -> int | None:
    """Return the maximum number of tokens by the model's config, None if it has none; for longrope see `longrope_switch_length`."""
    return longrope_switch_length(model) or getattr(_text_config(model), "max_position_embeddings", None)


def longrope_switch_length(model: nn.Module) -> int | None:
    """Return the length up to which a longrope model uses its first set of rotations; None for other models."""
    # Beyond it, a sequence's result would depend on the longest sequence in its batch, and on its length when its first tokens
    # were cached. vLLM uses the second set for all sequences if its context is longer.
    text = _text_config(model)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def _keep_training_format(policy: nn.Module) -> None:
    # bitsandbytes repacks 4-bit weights at the first inference on a CPU, in a format that its backward cannot read.
    for module in policy.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010


def convert_trainable(policy: nn.Module, settings: ModelSettings) -> None:
    """Convert trainable weights to the dtype in which they are trained, and log it: fp32, or bf16 if the user asked for it.

    LoRA's weights are always fp32. Call it after a reference in the checkpoint's dtype was copied.
    """
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad and p.is_floating_point()}
    halved = {name for name in trained if settings.trains_bf16 and "lora_" not in name}
    converted: Counter[str] = Counter()
    for name, parameter in trained.items():
        dtype = torch.bfloat16 if name in halved else torch.float32
        if parameter.dtype != dtype:
            converted[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
            parameter.data = parameter.data.to(dtype)
    if converted:
        _log_conversion(converted, to_bf16=bool(halved))


def _log_conversion(converted: Counter[str], *, to_bf16: bool) -> None:
    count, names = f"{converted.total():,}", " and ".join(sorted(converted))
    if to_bf16:
        logger.info(_ROUNDED, f"{count} trainable weights in {names}")
    else:
        logger.warning(
            "%s trainable weights were loaded in %s and converted to fp32; computation follows bf16. weight_bits=32 trains them "
            "as bf16, in half the memory.",
            count,
            names,
        )


@dataclass(frozen=True)
class HeadKind:
    """A kind of output head: `install` makes a model accept a `HeadRequest`, `verify` raises if its results are wrong."""

    install: Callable[..., Any]
    verify: Callable[[nn.Module], float]


LOGPROB_HEAD: HeadKind = HeadKind(install_head, verify_head)
SCORE_HEAD: HeadKind = HeadKind(install_score_head, verify_score_head)
