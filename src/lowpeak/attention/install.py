"""Forests of packed sequences as an input of unmodified transformers causal LMs.

A forest is a row of trees without padding between them; a tree has the tokens of sequences that begin alike.
`install_attention` registers "lowpeak" in transformers' attention registry and selects it for the model. Without the
keyword `forest` it calls sdpa with the same arguments, so generation, verification and padded batches are unchanged.
With it every layer attends as the forest says. The keyword goes from the model's forward to each layer's attention, and
activation checkpointing keeps it for the recomputation.

A model is supported if its layers attend causally, to all tokens, to a window or to chunks, with or without a cap of the
scores or sinks. Classes without sdpa (capped scores, sinks) get "lowpeak_eager", which calls their own code without a forest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowpeak.attention.flex import attend_flex, block_mask
from lowpeak.attention.mixers import MixerCalls, install_mixers, mixers_of, uninstall_mixers
from lowpeak.attention.scores import PLAIN, ScoreModifiers
from lowpeak.attention.sdpa import SdpaCalls
from lowpeak.attention.spans import FULL, STATE_TYPES, Span, attends, span_of_layer
from lowpeak.device_kind import device_kind
from lowpeak.errors import ModelError
from lowpeak.heads import causal_lm
from lowpeak.logprobs import cast_for_autocast
from lowpeak.records import Forest, Node

ATTENTION_NAME = "lowpeak"
EAGER_NAME = "lowpeak_eager"
SDPA, EAGER = "sdpa", "eager"
_DEVICES = ("cpu", "cuda", "meta")


def packing_unsupported_reason(model: nn.Module) -> str | None:
    """Return why a model, plain or wrapped, does not support packed sequences; None if it does.

    Only models loaded with their class's default do (sdpa, or eager where sdpa cannot cap scores): the attention for packed
    sequences replaces it, and agrees with it. A model loaded with another keeps that, because the user chose its numerics.
    """
    try:
        causal = causal_lm(model)
    except ModelError as error:
        return str(error)
    name = type(causal).__name__
    for check in (_layer_obstacle, _config_obstacle, _position_obstacle, _backend_obstacle, _module_obstacle):
        reason = check(causal, causal.config.get_text_config())
        if reason is not None:
            return f"{name} {reason}"
    return None


def _backend_obstacle(causal: Any, config: Any) -> str | None:
    """Return a reason if the model's attention does not go through transformers' registry."""
    decoder = causal.get_decoder()
    table = getattr(sys.modules[type(decoder).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    # Families with mixers do not declare the interface, also where they use it, or where nothing attends.
    uses_interface = bool(mixers_of(causal)) and (table is not None or not attends(config))
    if not (uses_interface or getattr(decoder, "_supports_attention_backend", False)):
        return "does not use transformers' attention interface"
    if not decoder._can_set_attn_implementation() or getattr(table, "_local_mapping", None):
        return "does not let its attention implementation be set"
    default = _default_attention(causal)
    if config._attn_implementation not in (ATTENTION_NAME, EAGER_NAME, default):
        return f"was loaded with attn_implementation={config._attn_implementation!r}; load it with {default!r}"
    return None


def _default_attention(causal: Any) -> str:
    return SDPA if getattr(causal.get_decoder(), "_supports_sdpa", False) else EAGER


def _config_obstacle(causal: nn.Module, config: Any) -> str | None:
    """Return a reason if the config says that attention is not causal over text."""
    reasons = (
        ("attn_temperature_tuning", "scales its queries by columns of the cache (attn_temperature_tuning)"),
        ("alibi", "biases its attention by distance (ALiBi)"),
    )
    for attribute, reason in reasons:
        if getattr(config, attribute, None):
            return reason
    # "vision": tokens of an image attend to each other.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "is not causal"
    return "is not causal" if getattr(config, "is_causal", True) is False else None


def _layer_obstacle(causal: nn.Module, config: Any) -> str | None:
    """Return a reason if layers neither attend to earlier tokens nor carry states through transformers' cache."""
    types = list(getattr(config, "layer_types", None) or ())
    num_states, num_mixers = sum(each in _STATE_TYPES for each in types), len(mixers_of(causal))
    if num_states != num_mixers or getattr(causal, "_is_stateful", False) > num_mixers:
        return "carries states from token to token otherwise than through transformers' cache"
    kinds = sorted(set(types) - _ATTENTION_TYPES - _STATE_TYPES - _STATELESS_TYPES)
    return f"has layers that are not plain attention ({', '.join(kinds)})" if kinds else None


def _position_obstacle(causal: nn.Module, config: Any) -> str | None:
    """Return a reason if a token's rotation depends on more than its position."""
    # That of longrope does beyond a length that no run's sequences reach (`longrope_switch_length`). Several positions per
    # token (mrope_section) are equal for text.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "dynamic":
        return "has rotary positions that depend on the longest sequence of the batch (dynamic)"
    return None


def _module_obstacle(causal: Any, config: Any) -> str | None:
    """Return a reason that is visible in the modules but not in the config."""
    decoder: Any = causal.get_decoder()
    for module in decoder.modules():
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


_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE_TYPES = {*STATE_TYPES, "hybrid"}  # "hybrid" attends, too
_STATELESS_TYPES = {"moe", "mlp"}

# Keywords that a layer may pass to its attention and that do not change the result.
_IGNORED = {
    "cache_position", "layer_idx", "shared_kv_states", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip

_detection_is_off: ContextVar[bool] = ContextVar("_detection_is_off", default=False)
_detect_packing = masking_utils.find_packed_sequence_indices


class HeadShape(NamedTuple):
    """Properties of a layer's attention: width of a key, query heads per key head, span and scores."""

    width: int
    share: int
    span: Span
    softcap: float | None
    has_sinks: bool


class ForestAttention:
    """A forest's block masks or kernel calls by span, built once per forward: the keyword `forest` of a model's forward.

    Neither a tuple nor a dataclass, because wrappers (DDP, FSDP) take these apart to move and cast tensors.
    """

    __slots__ = ("_block_masks", "_device", "_length", "_mixer_calls", "_sdpa_calls", "heads", "is_on_cuda", "nodes")

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.nodes: tuple[Node, ...] = forest.nodes
        self.is_on_cuda = device_kind(device) == "cuda"
        self._device, self._length = device, forest.position_ids_1L.shape[1]
        self.heads: set[HeadShape] = set()  # of the layers that attended
        self._block_masks: dict[Span, Any] = {}
        self._sdpa_calls: dict[Span, SdpaCalls] = {}
        self._mixer_calls: dict[bool, MixerCalls] = {}

    def block_mask(self, span: Span) -> Any:
        """Return FlexAttention's mask on CUDA, built by the first layer that needs it."""
        if span not in self._block_masks:
            self._block_masks[span] = block_mask(self.nodes, self._length, self._device, span)
        return self._block_masks[span]

    def sdpa_calls(self, query_1HLE: Tensor, span: Span = FULL) -> SdpaCalls:
        """Return the kernel calls off CUDA, built by the first layer that needs them."""
        if span not in self._sdpa_calls:
            self._sdpa_calls[span] = SdpaCalls(self.nodes, query_1HLE, span)
        return self._sdpa_calls[span]

    def mixer_calls(self, takes_state: bool) -> MixerCalls:
        """Return the calls of mixers that go on from a state, or of all others."""
        if takes_state not in self._mixer_calls:
            self._mixer_calls[takes_state] = MixerCalls(self.nodes, self._length, self._device, takes_state)
        return self._mixer_calls[takes_state]


def install_attention(model: nn.Module) -> None:
    """Let a causal LM, plain or wrapped, take `model(input_ids, **forward_arguments(forest, device))`.

    Its saved config does not change, and deep copies take forests too. Raises ModelError for unsupported models.
    """
    reason = packing_unsupported_reason(model)
    if reason is not None:
        raise ModelError(f"cannot run packed sequences: {reason}")
    causal = causal_lm(model)
    names = {SDPA: ATTENTION_NAME, EAGER: EAGER_NAME}
    for default, name in names.items():
        AttentionInterface.register(name, _attend)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[default])
    _set_attention(causal, names[_default_attention(causal)])
    install_mixers(causal)


def uninstall_attention(model: nn.Module) -> None:
    """Restore the attention that the model had before `install_attention`, if it was installed."""
    causal = causal_lm(model)
    if causal.config.get_text_config()._attn_implementation in (ATTENTION_NAME, EAGER_NAME):
        _set_attention(causal, _default_attention(causal))
        uninstall_mixers(causal)


def _set_attention(causal: Any, name: str) -> None:
    """Set the implementation of the text decoder, which in a model of images too has a config of its own."""
    text = causal.config.get_text_config()
    parts = [part for part in causal.config.sub_configs if getattr(causal.config, part) is text]
    causal.set_attn_implementation({part: name for part in parts} or name)


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
    """Turn off transformers' search of position ids for packed sequences, which reads the device."""
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
    """Return attention's output, [1, L, H, F], and no weights, as transformers' registry expects."""
    if forest is None:
        config: Any = module.config
        if config._attn_implementation == EAGER_NAME:
            return _eager_attention(module)(module, query, key, value, attention_mask, **kwargs)[0], None
        if _is_grouped_decode(query, key, attention_mask) and not _unknown(kwargs, "sliding_window"):
            return _attend_last_token(query, key, value, attention_mask, **kwargs), None
        return ALL_ATTENTION_FUNCTIONS[SDPA](module, query, key, value, attention_mask, **kwargs)
    span = span_of_layer(module.config, getattr(module, "layer_idx", None))
    _check_layer_arguments(module, query, attention_mask, span, kwargs)
    scores = ScoreModifiers(kwargs.get("softcap"), kwargs.get("s_aux"))
    share = query.shape[1] // key.shape[1]
    forest.heads.add(HeadShape(query.shape[-1], share, span, scores.softcap, scores.sinks_H is not None))
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # autocast casts the inputs of scaled_dot_product_attention, but not those of this function.
    query, key, value = cast_for_autocast(query), cast_for_autocast(key), cast_for_autocast(value)
    return attend_forest(query, key, value, forest, scale, span, scores), None


def _eager_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the attention function of a layer's own family."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _is_grouped_decode(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return whether one token per sequence attends in groups of heads, under one mask."""
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


def attend_forest(
    query: Tensor, key: Tensor, value: Tensor, forest: ForestAttention, scale: float, span: Span = FULL,
    scores: ScoreModifiers = PLAIN,
) -> Tensor:  # fmt: skip
    """Return attention over a forest, [1, L, H, F], by FlexAttention on CUDA and by `SdpaCalls` elsewhere."""
    is_fake = isinstance(query, FakeTensor)
    if forest.is_on_cuda and not is_fake:
        return attend_flex(query, key, value, forest.block_mask(span), scale, scores)
    width = value.shape[-1]
    # The kernel needs one width for queries and values; latent attention has narrower values.
    value = F.pad(value, (0, query.shape[-1] - width))
    if not forest.is_on_cuda:
        out = forest.sdpa_calls(query, span).attend(query, key, value, scale, scores)
    else:
        # Nothing can be compiled for fake tensors: plain causal attention takes the same memory.
        out = PLAIN.attend(query, key, value, None, scale).transpose(1, 2)
    return out[..., :width]


def _unknown(kwargs: dict[str, Any], *handled: str) -> list[str]:
    """Return the names of a layer's keywords that may change the result and are not `handled`."""
    known = _IGNORED | {"scaling", "dropout", "is_causal", *handled}
    return [key for key, value in kwargs.items() if key not in known and value is not None and value is not False]


def _check_layer_arguments(
    module: nn.Module, query: Tensor, mask: Tensor | None, span: Span, kwargs: dict[str, Any]
) -> None:
    """Raise ModelError if a layer passes arguments to its attention that would be ignored."""
    name = type(module).__name__
    if mask is None or mask.shape != (1, 1, 1, 1) or query.shape[0] != 1:
        raise ModelError(f"{name} changes its attention mask, which packed sequences do not have")
    if kwargs.get("dropout"):
        raise ModelError(f"{name} has attention dropout, which packed sequences cannot have: set it to 0")
    causal = kwargs.get("is_causal")
    if (getattr(module, "is_causal", True) if causal is None else causal) is False:
        raise ModelError(f"{name} is not causal, so its sequences cannot be packed")
    unknown = _unknown(kwargs, "softcap", "s_aux", "sliding_window" if span.is_window else "")
    if unknown:
        raise ModelError(f"{name} passes {', '.join(unknown)} to its attention, which packed sequences do not support")
