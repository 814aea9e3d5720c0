"""Loading: the policy, its tokenizer, the reference; precision and adapters are settled here and nowhere else.

Trainable weights are fp32 from loading (said once in the log) with bf16 compute where asked; frozen weights, and the
base under LoRA, stay in the checkpoint's dtype; adapters are fp32.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowpeak.arguments import WHOLE, Cut
from lowpeak.data import check_tokenizer
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.logprobs import install_head, install_score_head, verify_head, verify_score_head
from lowpeak.models.lora import add_training_adapter, remove_earlier_adapters, ties_lora_weights
from lowpeak.models.pretrained import from_pretrained
from lowpeak.models.sharded_loading import straight_to
from lowpeak.models.unwrap import is_peft
from lowpeak.models.value_heads import detach

logger = logging.getLogger(__name__)


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
        policy = add_training_adapter(policy, peft_config)
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
    remove_earlier_adapters(model)
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
    if ties_lora_weights(policy):
        raise ArgumentError(
            "ensure_weight_tying=True gives LoRA of a tied embedding and head one memory and two parameters, which an optimizer "
            "changes twice: put the embedding in modules_to_save in place of target_modules, or leave ensure_weight_tying out."
        )


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


@dataclass(frozen=True)
class Head:
    """`install(model, cast_head_to_fp32=...)` lets a model take a `HeadRequest`; `verify(model)` raises where it answers wrong."""

    install: Callable[..., Any]
    verify: Callable[[nn.Module], float]


LOGPROBS: Head = Head(install_head, verify_head)
SCORES = Head(install_score_head, verify_score_head)
