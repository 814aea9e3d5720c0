"""Loading: the policy, its tokenizer, the reference; precision and adapters are settled here and nowhere else.

Trainable weights are fp32 from loading (said once in the log) with bf16 compute where asked; frozen weights, and the
base under LoRA, stay in the checkpoint's dtype; adapters are fp32.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowpeak.arguments import WHOLE, Cut
from lowpeak.data import check_tokenizer
from lowpeak.errors import ArgumentError, ModelError, first_line, require_package
from lowpeak.logprobs import install_head, install_score_head, verify_head, verify_score_head
from lowpeak.models.pretrained import from_pretrained
from lowpeak.models.sharded_loading import straight_to
from lowpeak.models.value_heads import CRITIC, detach, keeping_critic, without_critic
from lowpeak.ranks import Ranks

logger = logging.getLogger(__name__)

REFERENCE_ADAPTER = "reference"


@dataclass(frozen=True)
class Reference:
    """The frozen reference: a model of its own, or (None) the policy itself while the context `use` is open."""

    model: nn.Module | None
    use: Callable[[], AbstractContextManager[Any]] = nullcontext


def load_policy(
    model: str | nn.Module,
    init_kwargs: Mapping[str, Any] | None,
    *,
    trust_remote_code: bool,
    peft_config: Any = None,
    cut: Cut = WHOLE,
    device: torch.device | None = None,
) -> nn.Module:
    """The model to train, by name, path or instance; with `peft_config`, under an adapter. See `upcast_trainable`.

    One that is `cut` where it is loaded is fp32 from there on; one that trains whole is read into the memory of its `device`.
    """
    if cut != WHOLE:
        _check_cut(model, init_kwargs, peft_config)
        init_kwargs = {**(init_kwargs or {}), "dtype": torch.float32}
    policy = _loaded_or_given(model, init_kwargs, trust_remote_code, cut, device)
    _keep_training_format(policy)
    if peft_config is not None:
        policy = _with_adapter(policy, peft_config)
    elif getattr(policy, "is_quantized", False) and not is_peft(policy):
        raise ArgumentError("a quantised model trains through an adapter: pass peft_config=LoraConfig(...).")
    _check_policy(policy)
    return policy


def _loaded_or_given(
    model: str | nn.Module,
    init_kwargs: Mapping[str, Any] | None,
    trust_remote_code: bool,
    cut: Cut,
    device: torch.device | None,
) -> nn.Module:
    if isinstance(model, str):
        given = dict(init_kwargs or {})
        placed = straight_to(device, given) if cut == WHOLE else {}
        return _load_causal(model, given | placed, trust_remote_code, cut)
    _check_instance(model, bool(init_kwargs) or trust_remote_code)
    _without_earlier_parts(model)
    return model


def _check_instance(model: Any, has_load_arguments: bool) -> None:
    if has_load_arguments:
        raise ArgumentError(
            "model_init_kwargs and trust_remote_code act when the model is given by name or path; an instance was given: "
            "remove them."
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model is {model!r:.80}, a {type(model).__name__}; pass a name or path as a string, or a model."
        )


def _load_causal(
    name: str,
    init_kwargs: Mapping[str, Any] | None,
    trust_remote_code: bool,
    cut: Cut = WHOLE,
    frozen_on: torch.device | None = None,
) -> nn.Module:
    kwargs = {"dtype": "auto", "trust_remote_code": trust_remote_code, **(init_kwargs or {})}
    return from_pretrained(AutoModelForCausalLM, name, cut, frozen_on, **kwargs)


def _check_cut(model: Any, init_kwargs: Mapping[str, Any] | None, peft_config: Any) -> None:
    if not isinstance(model, str):
        raise ArgumentError(
            "tensor parallelism cuts a model where it is loaded: pass its name or path, not an instance."
        )
    if peft_config is not None or "quantization_config" in (init_kwargs or {}):
        raise ArgumentError(
            "adapters and quantised models do not run under tensor parallelism: train them under fsdp2 or zero3."
        )


def _check_policy(policy: nn.Module) -> None:
    """Raise ModelError where training would silently do less than it seems to."""
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ModelError(
            "no weight of the model is trainable, so nothing would be learned: call requires_grad_(True) on what is to "
            "train, or load the adapter with PeftModel.from_pretrained(..., is_trainable=True)."
        )
    if _ties_lora(policy):
        raise ArgumentError(
            "ensure_weight_tying=True gives LoRA of a tied embedding and head one memory and two parameters, which an optimizer "
            "changes twice: put the embedding in modules_to_save in place of target_modules, or leave ensure_weight_tying out."
        )


def _ties_lora(policy: Any) -> bool:
    """Whether peft has made LoRA of the head out of views of the embedding's."""
    if not is_peft(policy) or not any(getattr(c, "ensure_weight_tying", False) for c in policy.peft_config.values()):
        return False
    base = policy.get_base_model()
    return all(hasattr(part, "lora_A") for part in (base.get_input_embeddings(), base.get_output_embeddings()))


def load_tokenizer(processing_class: Any, model: str | nn.Module, trust_remote_code: bool) -> Any:
    """The tokenizer passed in, or the one beside the model; ModelError where it is of no use (see `check_tokenizer`)."""
    if processing_class is not None:
        check_tokenizer(processing_class)
        return processing_class
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name:
        raise ArgumentError("the model instance does not say where its tokenizer is: pass processing_class=tokenizer.")
    tokenizer = from_pretrained(AutoTokenizer, name, trust_remote_code=trust_remote_code)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes of a missing one
        raise ModelError(f"there is no tokenizer beside {name!r}: save one there, or pass processing_class=tokenizer.")
    check_tokenizer(tokenizer)
    return tokenizer


def load_reference(
    policy: nn.Module,
    origin: str | nn.Module,
    init_kwargs: Mapping[str, Any] | None,
    ref_model: str | nn.Module | None = None,
    *,
    trust_remote_code: bool,
    cut: Cut = WHOLE,
    device: torch.device | None = None,
) -> nn.Module | None:
    """The frozen reference as a model of its own, for a `device`; None under LoRA, where it is the policy with adapters off.

    `origin` is what the user passed as the model: a name is loaded again in the checkpoint's dtype, an instance is
    copied as it stands now, before training moves it. A `ref_model` is taken in its place; an instance is used itself.
    """
    if isinstance(ref_model, nn.Module):
        if ref_model is origin:
            raise ArgumentError("ref_model is the model itself, which training moves: leave it out.")
        return ref_model
    if ref_model is not None:
        return _load_causal(ref_model, init_kwargs, trust_remote_code, cut, device)
    if is_peft(policy):
        return None
    if isinstance(origin, str):
        return _load_causal(origin, init_kwargs, trust_remote_code, cut, device)
    reference = copy.deepcopy(policy)
    detach(reference)
    return reference


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


def is_peft(model: nn.Module) -> bool:
    """Whether the model is a peft model, without importing peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: of dropout modules, and those that a module keeps as a number of its own."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if ("dropout" in name or name == "layerdrop") and isinstance(value, float):
                setattr(module, name, 0.0)


def context_length(model: nn.Module) -> int | None:
    """Most tokens that the model takes, by its config; None when it does not say.

    With longrope that is where its first rotations end.
    """
    return first_rotations(model) or getattr(_text_config(model), "max_position_embeddings", None)


def first_rotations(model: Any) -> int | None:
    """Up to which length a longrope model has one set of rotations; None for other models.

    Beyond, a row's numbers would depend on the longest row beside it, and on whether it was still short when its first tokens
    were cached. vLLM takes the second set for all rows where its context is longer.
    """
    text = _text_config(model)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def _with_adapter(policy: nn.Module, peft_config: Any) -> nn.Module:
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


def _without_earlier_parts(policy: Any) -> None:
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


def _keep_training_format(policy: nn.Module) -> None:
    """bitsandbytes repacks 4-bit weights at the first inference on a CPU, and its backward cannot read that format."""
    for module in policy.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010


def upcast_trainable(policy: nn.Module) -> None:
    """Make trainable weights fp32, said once in the log; call it after the reference was taken in its own dtype."""
    low = [p for p in policy.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    for parameter in low:
        parameter.data = parameter.data.float()
    if low:
        count = sum(p.numel() for p in low)
        logger.warning(
            "%s trainable weights were loaded in half precision and are now fp32; compute follows bf16.", f"{count:,}"
        )


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


@dataclass(frozen=True)
class Head:
    """`install(model, cast_head_to_fp32=...)` lets a model take a `HeadRequest`; `verify(model)` raises where it answers wrong."""

    install: Callable[..., Any]
    verify: Callable[[nn.Module], float]


LOGPROBS: Head = Head(install_head, verify_head)
SCORES = Head(install_score_head, verify_score_head)
