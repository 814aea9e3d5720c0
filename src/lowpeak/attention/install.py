"""Forests of packed sequences as an input of unmodified transformers causal LMs.

A forest is a row of trees without padding between them; a tree is a prompt followed by its completions.
`install_attention` registers "lowpeak" in transformers' attention registry and selects it for the model. Without the
keyword `forest` it calls sdpa with the same arguments, so generation, verification and padded batches are unchanged.
With it every layer attends as the forest says. The keyword goes from the model's forward to each layer's attention, and
activation checkpointing keeps it for the recomputation.

A model is supported if every layer has plain causal attention only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowpeak.attention.flex import attend_flex, block_mask
from lowpeak.attention.sdpa import SdpaCalls
from lowpeak.device_kind import device_kind
from lowpeak.errors import ModelError
from lowpeak.heads import causal_lm
from lowpeak.logprobs import cast_for_autocast
from lowpeak.records import Forest, Tree

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
    for check in (_config_obstacle, _position_obstacle, _backend_obstacle, _module_obstacle):
        reason = check(causal, causal.config)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _backend_obstacle(causal: Any, config: Any) -> str | None:
    """Return a reason if the model's attention does not go through transformers' registry."""
    if not (getattr(causal, "_supports_attention_backend", False) and getattr(causal, "_supports_sdpa", False)):
        return "does not use transformers' attention interface"
    table = getattr(sys.modules[type(causal).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    if not causal._can_set_attn_implementation() or getattr(table, "_local_mapping", None):
        return "does not let its attention implementation be set"
    if config._attn_implementation not in (ATTENTION_NAME, SDPA):
        return f"was loaded with attn_implementation={config._attn_implementation!r}; load it with {SDPA!r}"
    return None


def _config_obstacle(causal: nn.Module, config: Any) -> str | None:
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


def _position_obstacle(causal: nn.Module, config: Any) -> str | None:
    """Return a reason if a token's rotation depends on more than its position."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "mrope_section" in rope:
        return "has multimodal rotary positions, several per token"
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("dynamic", "longrope"):
        return f"has rotary positions that depend on the longest sequence of the batch ({kind})"
    return None


def _module_obstacle(causal: nn.Module, config: Any) -> str | None:
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


# Keywords that a layer may pass to its attention and that do not change the result.
_IGNORED = {
    "cache_position", "layer_idx", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip

_detection_is_off: ContextVar[bool] = ContextVar("_detection_is_off", default=False)
_detect_packing = masking_utils.find_packed_sequence_indices


class ForestAttention:
    """A forest's block mask or kernel calls, built once per forward: the keyword argument `forest` of a model's forward.

    Neither a tuple nor a dataclass, because wrappers (DDP, FSDP) take these apart to move and cast tensors.
    """

    __slots__ = ("_sdpa_calls", "block_mask", "trees")

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.trees: tuple[Tree, ...] = forest.trees
        length = forest.position_ids_1L.shape[1]
        self.block_mask = block_mask(forest.trees, length, device) if device_kind(device) == "cuda" else None
        self._sdpa_calls: SdpaCalls | None = None

    def sdpa_calls(self, query_1HLE: Tensor) -> SdpaCalls:
        """Return the kernel calls off CUDA, built by the first layer that needs them."""
        if self._sdpa_calls is None:
            self._sdpa_calls = SdpaCalls(self.trees, query_1HLE)
        return self._sdpa_calls


def install_attention(model: nn.Module) -> None:
    """Let a causal LM, plain or wrapped, take `model(input_ids, **forward_arguments(forest, device))`.

    Its saved config does not change, and deep copies take forests too. Raises ModelError for unsupported models.
    """
    reason = packing_unsupported_reason(model)
    if reason is not None:
        raise ModelError(f"cannot run packed sequences: {reason}")
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS[SDPA])
    causal_lm(model).set_attn_implementation(ATTENTION_NAME)


def uninstall_attention(model: nn.Module) -> None:
    """Restore the attention that the model had before `install_attention`, if it was installed."""
    causal = causal_lm(model)
    if causal.config._attn_implementation == ATTENTION_NAME:
        causal.set_attn_implementation(SDPA)


def forward_arguments(forest: Forest, device: torch.device | str) -> dict[str, Any]:
    """Return the keywords to add to `model(input_ids=ids_1L, ...)` for the packed sequences of `forest`."""
    device = torch.device(device)
    return {
        "position_ids": forest.position_ids_1L.to(device, non_blocking=True),
        # transformers passes a mask of four dimensions on. Without one it would build a mask, and search the position ids
        # for packed sequences, which reads the device.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
        "forest": ForestAttention(forest, device),
    }


@contextmanager
def no_packing_detection() -> Iterator[None]:
    """Turn off transformers' search of position ids for packed sequences, which reads the device, in this context."""
    masking_utils.find_packed_sequence_indices = _detect_packing_if_on
    token = _detection_is_off.set(True)
    try:
        yield
    finally:
        _detection_is_off.reset(token)


def _detect_packing_if_on(position_ids: Tensor) -> Tensor | None:
    """Return transformers' answer; None inside `no_packing_detection` in this thread."""
    return None if _detection_is_off.get() else _detect_packing(position_ids)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: ForestAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention's output, [1, L, H, F], and no weights, as transformers' registry expects of a function."""
    if forest is None:
        if _is_grouped_decode(query, key, attention_mask) and not _unknown(kwargs):
            return _attend_last_token(query, key, value, attention_mask, **kwargs), None
        return ALL_ATTENTION_FUNCTIONS[SDPA](module, query, key, value, attention_mask, **kwargs)
    _check_layer_arguments(module, query, attention_mask, kwargs)
    scale = kwargs.get("scaling")
    # autocast casts the inputs of scaled_dot_product_attention, but not those of this function.
    query, key, value = cast_for_autocast(query), cast_for_autocast(key), cast_for_autocast(value)
    return attend_forest(query, key, value, forest, query.shape[-1] ** -0.5 if scale is None else scale), None


def _is_grouped_decode(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return whether one token per sequence attends in groups of heads, with one mask for all heads."""
    return mask is not None and query.shape[2] == mask.shape[1] == 1 and query.shape[1] > key.shape[1]


def _attend_last_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None = None,
    dropout: float = 0.0, **_: Any,
) -> Tensor:  # fmt: skip
    """Return attention [N, 1, H, F]; the heads of a group are the query rows of one KV head, [N, K, H / K, E].

    transformers before 5.20 copies keys and values for each head of their group instead.
    """
    num_rows, num_heads, _length, width = query.shape
    packed = query.reshape(num_rows, key.shape[1], -1, width)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(num_rows, 1, num_heads, value.shape[-1])


def attend_forest(query: Tensor, key: Tensor, value: Tensor, forest: ForestAttention, scale: float) -> Tensor:
    """Return attention over a forest, [1, L, H, F], by FlexAttention on CUDA and by `SdpaCalls` elsewhere."""
    if forest.block_mask is not None and not isinstance(query, FakeTensor):
        return attend_flex(query, key, value, forest.block_mask, scale)
    width = value.shape[-1]
    # The kernel needs one width for queries and values; latent attention has narrower values.
    value = F.pad(value, (0, query.shape[-1] - width))
    if forest.block_mask is None:
        out = forest.sdpa_calls(query).attend(query, key, value, scale)
    else:
        # Nothing can be compiled for fake tensors: plain causal attention takes the same memory.
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True).transpose(
            1, 2
        )
    return out[..., :width]


def _unknown(kwargs: dict[str, Any]) -> list[str]:
    """Return the names of a layer's keywords that this module does not know and that may change the result."""
    known = _IGNORED | {"scaling", "dropout", "is_causal"}
    return [key for key, value in kwargs.items() if key not in known and value is not None and value is not False]


def _check_layer_arguments(module: nn.Module, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise ModelError if a layer passes arguments to its attention that would be ignored."""
    name = type(module).__name__
    if mask is None or mask.shape != (1, 1, 1, 1) or query.shape[0] != 1:
        raise ModelError(f"{name} changes its attention mask, which packed sequences do not have")
    if kwargs.get("dropout"):
        raise ModelError(f"{name} has attention dropout, which packed sequences cannot have: set it to 0")
    causal = kwargs.get("is_causal")
    if (getattr(module, "is_causal", True) if causal is None else causal) is False:
        raise ModelError(f"{name} is not causal, so its sequences cannot be packed")
    unknown = _unknown(kwargs)
    if unknown:
        raise ModelError(f"{name} passes {', '.join(unknown)} to its attention, which packed sequences do not support")
