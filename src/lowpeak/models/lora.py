"""LoRA adapters: adding one to a policy, and the reference model inside a policy with an adapter."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowpeak.arguments import show_bytes
from lowpeak.errors import ArgumentError, first_line, require_package
from lowpeak.heads import CRITIC, is_peft, keep_critic_trainable, remove_critic, without_critic
from lowpeak.ranks import Ranks

REFERENCE_ADAPTER = "reference"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """The frozen reference, or a teacher: a separate model, or (None) the policy inside the context `ready`.

    A teacher shares its first `num_ids` ids with the policy. `with_adapters`: it is the policy with its adapters.
    """

    model: nn.Module | None
    ready: Callable[[], AbstractContextManager[Any]] = nullcontext
    num_ids: int | None = None
    with_adapters: bool = False


def adapter_reference(policy: nn.Module) -> Reference:
    """Return the reference under LoRA: the policy without adapters, or with a frozen copy of an adapter that was trained before."""
    adapter = _trained_adapter(policy)
    # Rank 0 decides, since the other ranks may not have the adapter's weights yet.
    if Ranks().call_on_first(lambda: _has_effect(policy, adapter)):
        with keep_critic_trainable(policy):
            _copy_adapter(policy, adapter)
        return Reference(None, lambda: _reference_adapter_on(policy, adapter))
    return Reference(None, lambda: _adapters_off(policy))


def own_teacher(policy: nn.Module, num_ids: int, *, with_adapters: bool) -> Reference:
    """Return the teacher that is the policy itself, or the base under its adapter, for the first `num_ids` ids."""
    configs = getattr(policy, "peft_config", {}).values()
    if not with_adapters and any(getattr(config, "bias", "none") not in ("none", False) for config in configs):
        raise ArgumentError(
            "the adapter's bias setting trains biases of the base model, which is the teacher: set bias='none', or pass a "
            "teacher_model."
        )
    ready: Callable[[], AbstractContextManager[Any]] = nullcontext if with_adapters else lambda: _adapters_off(policy)
    return Reference(None, ready, num_ids, with_adapters)


def _trained_adapter(policy: Any) -> str:
    """Return the adapter to train; ArgumentError unless it is the only one and the base model is frozen."""
    active = [name for name in policy.active_adapters if name != CRITIC]
    if len(active) != 1:
        raise ArgumentError(
            f"beta above 0 needs exactly one active adapter for its reference, got {', '.join(active) or 'none'}: "
            "activate one with model.set_adapter(name), or set beta=0."
        )
    if getattr(policy.peft_config[active[0]], "bias", "none") not in ("none", False):
        raise ArgumentError(
            "the adapter's bias setting trains biases of the base model, which is the reference: set bias='none', or beta=0."
        )
    return active[0]


def _has_effect(policy: nn.Module, adapter: str) -> bool:
    """Return whether the adapter changes the model's output; a new one has a zero factor, or copies of the base's modules."""
    named = dict(policy.named_parameters())
    return any(
        _changes_output(name, parameter, adapter, named)
        for name, parameter in named.items()
        if adapter in name.split(".")
    )


def _changes_output(name: str, parameter: nn.Parameter, adapter: str, named: Mapping[str, nn.Parameter]) -> bool:
    parts = name.split(".")
    if {"lora_A", "lora_embedding_B", "lora_magnitude_vector"} & set(parts):  # no effect while the other factor is zero
        return False
    if {"lora_B", "lora_embedding_A"} & set(parts):
        return bool(parameter.detach().any())
    original = named.get(name.replace(f".modules_to_save.{adapter}.", ".original_module."))
    if original is not None and original is not parameter:
        return not torch.equal(parameter.detach(), original.detach().to(parameter))
    return True  # another kind of adapter: a copy is correct in any case


def _copy_adapter(policy: Any, adapter: str) -> None:
    with without_critic(policy.get_base_model()):
        policy.add_adapter(REFERENCE_ADAPTER, policy.peft_config[adapter])
    params = dict(policy.named_parameters())
    with torch.no_grad():
        for name, parameter in params.items():
            if REFERENCE_ADAPTER in (parts := name.split(".")):
                parameter.copy_(params[".".join(adapter if part == REFERENCE_ADAPTER else part for part in parts)])
    _activate(policy, adapter)


@contextmanager
def _adapters_off(policy: Any) -> Iterator[None]:
    with keep_critic_trainable(policy), policy.disable_adapter():
        yield


@contextmanager
def _reference_adapter_on(policy: nn.Module, adapter: str) -> Iterator[None]:
    with keep_critic_trainable(policy):
        _activate(policy, REFERENCE_ADAPTER)
        try:
            yield
        finally:
            _activate(policy, adapter)


def _activate(policy: Any, adapter: str) -> None:
    policy.set_adapter(adapter)
    for name, parameter in policy.named_parameters():
        if REFERENCE_ADAPTER in name.split("."):
            parameter.requires_grad_(False)


def add_training_adapter(policy: nn.Module, peft_config: Any) -> nn.Module:
    """Return the policy under a new adapter; a quantised policy is prepared for training first."""
    if is_peft(policy):
        raise ArgumentError("the model has an adapter already and peft_config adds another: pass one of the two.")
    require_package("peft", "peft_config", "peft")
    if getattr(policy, "is_quantized", False):
        policy = _prepare_quantized(policy)
    return add_adapter(policy, peft_config)


def _prepare_quantized(policy: nn.Module) -> nn.Module:
    """Freeze a quantised policy, and widen its other parameters to fp32, except experts: they are most of a mixture."""
    from peft import prepare_model_for_kbit_training

    model: Any = policy
    config = model.config.get_text_config()
    if hasattr(config, "altup_coef_clip") or hasattr(config, "zero_expert_num"):  # Gemma 3n, LongCat-Flash
        use = (
            "clips weights in place"
            if hasattr(config, "altup_coef_clip")
            else "multiplies by its routers' weights itself"
        )
        raise ArgumentError(
            f"{model.config.model_type} cannot train in 4 or 8 bits: its code in transformers {use}, which packed weights do "
            "not allow. Remove quantization_config."
        )
    experts = [(p, p.data) for each in expert_parameters(policy).values() for p in each]
    if experts:
        shown = show_bytes(expert_bytes(policy))
        logger.warning("Of the quantised model %s are experts, which bitsandbytes leaves as they are.", shown)
    for parameter, data in experts:
        parameter.data = data.new_empty(0)
    try:
        prepared: nn.Module = prepare_model_for_kbit_training(policy, use_gradient_checkpointing=False)
    finally:
        for parameter, data in experts:
            parameter.data = data
    return prepared


def add_adapter(model: nn.Module, peft_config: Any, **options: Any) -> nn.Module:
    """Return the model under a new adapter; ArgumentError, with peft's reason, if the adapter does not fit it."""
    from peft import get_peft_model

    if str(getattr(peft_config, "target_modules", None)).lower() == "all-linear":
        peft_config = _exclude(peft_config, _unadaptable_layers(model))
    try:
        with warnings.catch_warnings():
            # peft reads `is_gradient_checkpointing`, which transformers 5.24 renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            return get_peft_model(model, peft_config, **options)
    except ValueError as error:
        reason = first_line(error)
        remedy = "set target_modules, such as 'all-linear'" if "target_modules" in reason else "correct it"
        raise ArgumentError(f"peft_config does not fit the model ({reason}): {remedy}.") from error


def _exclude(peft_config: Any, names: list[str]) -> Any:
    """Return a copy of the config that leaves these modules out as well."""
    config, before = copy.copy(peft_config), getattr(peft_config, "exclude_modules", None)
    if isinstance(before, str):
        config.exclude_modules = "|".join([f"(?:{before})", *map(re.escape, names)])
    else:
        config.exclude_modules = [*(before or ()), *names]
    return config


def _unadaptable_layers(model: Any) -> list[str]:
    """Return the linear layers that all-linear names, and that an adapter cannot or should not change.

    Mamba's kernels read the weight of `out_proj` past its adapter. Some of a model's own layers return other things than a
    product (routers, grouped products). What a model has for images or sound is not trained.
    """
    text = model.get_decoder() if model.config.get_text_config() is not model.config else model
    in_text = {id(module) for part in (text, model.get_input_embeddings()) for module in part.modules()}
    excluded = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (id(module) not in in_text or not _is_product(module, model)):
            excluded.append(name)
        elif hasattr(module, "A_log") and hasattr(module, "D"):
            excluded.append(f"{name}.out_proj")
    return excluded


def _is_product(layer: nn.Linear, model: nn.Module) -> bool:
    """Return whether a layer maps [1, inputs] to [1, outputs], unlike some models' linear layers."""
    if type(layer).__module__ != type(model).__module__:
        return True
    shapes = {"weight": (layer.out_features, layer.in_features), "bias": (layer.out_features,)}
    tensors = {name: torch.empty(shapes[name], device="meta") for name in layer._parameters.keys() & shapes.keys()}
    try:
        out = torch.func.functional_call(layer, tensors, torch.empty(1, layer.in_features, device="meta"))
    except (IndexError, RuntimeError, ValueError):  # it expects another shape
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, layer.out_features)


def expert_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return by name the experts that are parameters of three dimensions, which all-linear does not adapt."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3 and ".experts." in name:
            found.setdefault(".".join(name.split(".")[-2:]), []).append(parameter)
    return found


def expert_bytes(model: nn.Module) -> int:
    """Return the bytes of all `expert_parameters`."""
    return sum(parameter.nbytes for each in expert_parameters(model).values() for parameter in each)


def warn_of_frozen_experts(policy: Any) -> None:
    """Warn if the experts of a mixture, which are parameters of three dimensions, have no adapters."""
    experts = sorted(name for name, each in expert_parameters(policy).items() if not all(p.requires_grad for p in each))
    if experts and not any(getattr(config, "target_parameters", None) for config in policy.peft_config.values()):
        logger.warning("The adapter leaves the experts frozen; lora_target_parameters=%s adapts them.", experts)


def remove_added_modules(policy: Any) -> None:
    """Remove the critic and the reference adapter that an earlier run added to a model instance."""
    if not is_peft(policy):
        remove_critic(policy)
        return
    for adapter in (CRITIC, REFERENCE_ADAPTER):
        if policy.active_adapters == [adapter]:
            raise ArgumentError(
                f"the model's active adapter is named {adapter!r}, a name that lowpeak uses: load it under another "
                "adapter_name."
            )
    remove_critic(policy.get_base_model())
    for adapter in (CRITIC, REFERENCE_ADAPTER):
        if adapter in policy.peft_config:
            policy.delete_adapter(adapter)


def ties_lora_weights(policy: Any) -> bool:
    """Return whether peft has tied the LoRA weights of the head to the embedding's, as views."""
    if not is_peft(policy) or not any(getattr(c, "ensure_weight_tying", False) for c in policy.peft_config.values()):
        return False
    base = policy.get_base_model()
    return all(hasattr(part, "lora_A") for part in (base.get_input_embeddings(), base.get_output_embeddings()))
