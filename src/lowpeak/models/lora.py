"""LoRA adapters: adding one to a policy, and the reference that a policy under an adapter carries in itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowpeak.errors import ArgumentError, first_line, require_package
from lowpeak.models.unwrap import is_peft
from lowpeak.models.value_heads import CRITIC, detach, keeping_critic, without_critic
from lowpeak.ranks import Ranks

REFERENCE_ADAPTER = "reference"


@dataclass(frozen=True)
class Reference:
    """The frozen reference: a model of its own, or (None) the policy itself while the context `use` is open."""

    model: nn.Module | None
    use: Callable[[], AbstractContextManager[Any]] = nullcontext


def adapter_reference(policy: Any) -> Reference:
    """The reference under LoRA: adapters off; or, for an adapter that came in trained, a frozen copy of that adapter."""
    adapter = _only_adapter(policy)
    if Ranks().first(lambda: _has_effect(policy, adapter)):  # others may have no weights of it yet
        with keeping_critic(policy):
            _copy_adapter(policy, adapter)
        return Reference(None, lambda: _other_adapter(policy, adapter))
    return Reference(None, lambda: _no_adapter(policy))


def _only_adapter(policy: Any) -> str:
    """The adapter that trains; ArgumentError where there are several, or where the base below it trains too."""
    own = [name for name in policy.active_adapters if name != CRITIC]
    if len(own) != 1:
        raise ArgumentError(
            f"beta above 0 takes a reference by one adapter, and {', '.join(own) or 'none'} are active: activate one with "
            "model.set_adapter(name), or set beta=0."
        )
    if getattr(policy.peft_config[own[0]], "bias", "none") not in ("none", False):
        raise ArgumentError(
            "the adapter's bias setting trains biases of the base, which then is no reference any more: set bias='none', or beta=0."
        )
    return own[0]


def _has_effect(policy: nn.Module, adapter: str) -> bool:
    """Whether the adapter may change the model: a fresh LoRA has a factor of zeros, a module to save is the base's own still."""
    named = dict(policy.named_parameters())
    return any(
        _acts(name, parameter, adapter, named) for name, parameter in named.items() if adapter in name.split(".")
    )


def _acts(name: str, parameter: nn.Parameter, adapter: str, named: Mapping[str, nn.Parameter]) -> bool:
    parts = name.split(".")
    if {"lora_A", "lora_embedding_B", "lora_magnitude_vector"} & set(parts):  # nothing without the other factor
        return False
    if {"lora_B", "lora_embedding_A"} & set(parts):
        return bool(parameter.detach().any())
    original = named.get(name.replace(f".modules_to_save.{adapter}.", ".original_module."))
    if original is not None and original is not parameter:
        return not torch.equal(parameter.detach(), original.detach().to(parameter))
    return True  # of another kind: a copy of it is right in any case


def _copy_adapter(policy: Any, adapter: str) -> None:
    with without_critic(policy.get_base_model()):
        policy.add_adapter(REFERENCE_ADAPTER, policy.peft_config[adapter])
    own = dict(policy.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            if REFERENCE_ADAPTER in (parts := name.split(".")):
                parameter.copy_(own[".".join(adapter if part == REFERENCE_ADAPTER else part for part in parts)])
    _activate(policy, adapter)


@contextmanager
def _no_adapter(policy: Any) -> Iterator[None]:
    with keeping_critic(policy), policy.disable_adapter():
        yield


@contextmanager
def _other_adapter(policy: Any, adapter: str) -> Iterator[None]:
    with keeping_critic(policy):
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
    if is_peft(policy):
        raise ArgumentError("the model already has an adapter and peft_config asks for another: pass one of the two.")
    require_package("peft", "peft_config", "peft")
    from peft import prepare_model_for_kbit_training

    if getattr(policy, "is_quantized", False):
        policy = prepare_model_for_kbit_training(policy, use_gradient_checkpointing=False)
    return add_adapter(policy, peft_config)


def add_adapter(model: Any, peft_config: Any, **options: Any) -> nn.Module:
    """Return the model under a new adapter; ArgumentError, with peft's reason, if the adapter does not fit it."""
    from peft import get_peft_model

    try:
        return get_peft_model(model, peft_config, **options)
    except ValueError as error:
        reason = first_line(error)
        raise ArgumentError(f"peft_config does not fit the model ({reason}): correct it.") from error


def remove_earlier_adapters(policy: Any) -> None:
    """Take away what an earlier run left in an instance, its critic and its copy of an adapter: each run makes its own."""
    if not is_peft(policy):
        detach(policy)
        return
    for adapter in (CRITIC, REFERENCE_ADAPTER):
        if policy.active_adapters == [adapter]:
            raise ArgumentError(
                f"the model trains an adapter of the name {adapter!r}, which is what lowpeak calls one of its own: load it under "
                "another adapter_name."
            )
    detach(policy.get_base_model())
    for adapter in (CRITIC, REFERENCE_ADAPTER):
        if adapter in policy.peft_config:
            policy.delete_adapter(adapter)


def ties_lora_weights(policy: Any) -> bool:
    """Whether peft has made LoRA of the head out of views of the embedding's."""
    if not is_peft(policy) or not any(getattr(c, "ensure_weight_tying", False) for c in policy.peft_config.values()):
        return False
    base = policy.get_base_model()
    return all(hasattr(part, "lora_A") for part in (base.get_input_embeddings(), base.get_output_embeddings()))
