"""Support of models for packed sequences: only plain causal attention in every layer."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from lowpeak.errors import ModelError
from lowpeak.logprobs import causal_lm

ATTENTION_NAME = "lowpeak"
SDPA = "sdpa"
_DEVICES = ("cpu", "cuda", "meta")


def packing_unsupported_reason(model: nn.Module) -> str | None:
    """Return why a model, plain or wrapped, does not support packed sequences; None if it does.

    Only models loaded with sdpa do: the attention for packed sequences replaces it, and agrees with it. A model loaded with
    another (eager, flash attention) keeps that, because the user chose its numerics.
    """
    try:
        causal = causal_lm(model)
    except ModelError as error:
        return str(error)
    name = type(causal).__name__
    for check in (_config, _positions, _backend, _modules):
        reason = check(causal, causal.config)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _backend(causal: Any, config: Any) -> str | None:
    """Return a reason if the model's attention does not go through transformers' registry."""
    if not (getattr(causal, "_supports_attention_backend", False) and getattr(causal, "_supports_sdpa", False)):
        return "does not use transformers' attention interface"
    table = getattr(sys.modules[type(causal).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    if not causal._can_set_attn_implementation() or getattr(table, "_local_mapping", None):
        return "does not let its attention implementation be set"
    if config._attn_implementation not in (ATTENTION_NAME, SDPA):
        return f"was loaded with attn_implementation={config._attn_implementation!r}; load it with {SDPA!r}"
    return None


def _config(causal: Any, config: Any) -> str | None:
    """Return a reason if the config says that attention is not plain and causal over text."""
    if getattr(config, "sub_configs", None):
        return "is a multimodal model (images, audio), whose sequences are not text alone"
    if getattr(causal, "_is_stateful", False):
        return "carries a state from token to token (state-space, linear-attention or recurrent layers)"
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        return f"has layers that are not plain attention ({', '.join(kinds)})"
    reasons = (
        ("sliding_window", "attends to a sliding window", not getattr(config, "layer_types", None)),
        ("attention_chunk_size", "attends in chunks", True),
        ("attn_logit_softcapping", "caps its attention scores", True),
        ("alibi", "biases its attention by distance (ALiBi)", True),
        ("use_bidirectional_attention", "is not causal", True),
    )
    for attribute, reason, applies in reasons:
        if applies and getattr(config, attribute, None):
            return reason
    return "is not causal" if getattr(config, "is_causal", True) is False else None


def _positions(causal: Any, config: Any) -> str | None:
    """Return a reason if a token's rotation depends on more than its position."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "mrope_section" in rope:
        return "has multimodal rotary positions, several per token"
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("dynamic", "longrope"):
        return f"has rotary positions that depend on the longest sequence of the batch ({kind})"
    return None


def _modules(causal: Any, config: Any) -> str | None:
    """Return a reason that is visible in the modules but not in the config."""
    for module in causal.modules():
        if getattr(module, "sinks", None) is not None:
            return "has attention sinks"
        if "Attention" in type(module).__name__ and getattr(module, "is_causal", True) is False:
            return "is not causal"
        if _dropout(module) > 0:
            return "has attention dropout, which packed sequences cannot have; set it to 0"
    devices = sorted({parameter.device.type for parameter in causal.parameters()} - set(_DEVICES))
    return f"is on {devices[0]}, where packed sequences are not supported" if devices else None


def _dropout(module: nn.Module) -> float:
    """Return the dropout of an attention module, which may be a number or a submodule."""
    for attribute in ("attention_dropout", "attn_dropout"):
        value: Any = getattr(module, attribute, None)
        if isinstance(value, nn.Dropout):
            value = value.p
        if isinstance(value, float | int):
            return float(value)
    return 0.0
