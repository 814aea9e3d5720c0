"""Which models can run several sequences in one row: those whose layers are plain causal attention, and no other."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from lowpeak.errors import ModelError
from lowpeak.logprobs import causal_lm

NAME = "lowpeak"
REPLACED = "sdpa"
_DEVICES = ("cpu", "cuda", "meta")


def why_not(model: nn.Module) -> str | None:
    """Why a model, plain or wrapped, cannot run a forest; None where it can.

    One rule for the attention kernel: a forest's attention replaces sdpa, and agrees with it. A model loaded with
    another (eager, flash attention) keeps it, because whoever chose it chose its numbers.
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
    """Whether its attention goes through transformers' registry."""
    if not (getattr(causal, "_supports_attention_backend", False) and getattr(causal, "_supports_sdpa", False)):
        return "has attention of its own, outside of transformers' attention interface"
    table = getattr(sys.modules[type(causal).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    if not causal._can_set_attn_implementation() or getattr(table, "_local_mapping", None):
        return "does not let its attention function be chosen"
    if config._attn_implementation not in (NAME, REPLACED):
        return f"was loaded with attn_implementation={config._attn_implementation!r}; load it with {REPLACED!r}"
    return None


def _config(causal: Any, config: Any) -> str | None:
    """Whether its config promises plain causal attention over one row of text."""
    if getattr(config, "sub_configs", None):
        return "is a model of several parts (images, audio), whose rows are not text alone"
    if getattr(causal, "_is_stateful", False):
        return "carries a state from token to token (state-space, linear or recurrent layers)"
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
    for attribute, reason, matters in reasons:
        if matters and getattr(config, attribute, None):
            return reason
    return "is not causal" if getattr(config, "is_causal", True) is False else None


def _positions(causal: Any, config: Any) -> str | None:
    """Whether a token's rotation depends on its own position alone."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "mrope_section" in rope:
        return "has multimodal rotary positions, of which there are several per token"
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("dynamic", "longrope"):
        return f"has rotary positions that depend on the longest sequence of the batch ({kind})"
    return None


def _modules(causal: Any, config: Any) -> str | None:
    """Whether nothing in its modules says what its config does not."""
    for module in causal.modules():
        if getattr(module, "sinks", None) is not None:
            return "has attention sinks"
        if "Attention" in type(module).__name__ and getattr(module, "is_causal", True) is False:
            return "is not causal"
        if _dropout(module) > 0:
            return "has attention dropout, which a row of several sequences cannot have; set it to 0"
    devices = sorted({parameter.device.type for parameter in causal.parameters()} - set(_DEVICES))
    return f"is on {devices[0]}, where several sequences in one row are not supported" if devices else None


def _dropout(module: nn.Module) -> float:
    """The dropout that an attention module applies to its weights: a number, or a module of that name."""
    for attribute in ("attention_dropout", "attn_dropout"):
        found: Any = getattr(module, attribute, None)
        if isinstance(found, nn.Dropout):
            found = found.p
        if isinstance(found, float | int):
            return float(found)
    return 0.0
