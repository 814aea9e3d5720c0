"""An unmodified transformers causal LM that takes forests, through the library's registry of attention functions.

`install_attention` names "lowpeak" as the model's attention. Without a `forest` it is sdpa, argument for argument, so
that generation, verification and padded rows are what they were; with one, every layer attends as the forest says.
The forest travels as a keyword argument from the model's forward to each layer's attention; activation checkpointing
keeps it for the recomputation. The dummy mask of four dimensions is what transformers passes on as it is: it keeps it
from building a mask of its own, and from looking for packed sequences in the position ids, which reads the device.
"""

from __future__ import annotations

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

from lowpeak.attention.flex import flex_attention_row
from lowpeak.attention.layout import ForestLayout
from lowpeak.attention.support import NAME, REPLACED, why_not
from lowpeak.errors import ModelError
from lowpeak.logprobs import causal_lm
from lowpeak.records import Forest

# What a layer may pass on to its attention that does not change what the attention means.
_WITHOUT_MEANING = {
    "cache_position", "layer_idx", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip

_rows_are_padded: ContextVar[bool] = ContextVar("_rows_are_padded", default=False)
_find_packed_sequences = masking_utils.find_packed_sequence_indices


def install_attention(model: nn.Module) -> None:
    """Let a causal LM, plain or wrapped, take `model(input_ids, **forward_arguments(forest, device))`.

    Its saved config does not change, and a deep copy takes forests too. Raises ModelError where `why_not` has a reason.
    """
    reason = why_not(model)
    if reason is not None:
        raise ModelError(f"cannot run several sequences in one row: {reason}")
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[REPLACED])
    causal_lm(model).set_attn_implementation(NAME)


def uninstall_attention(model: nn.Module) -> None:
    """Give a model back the attention it had; nothing happens where none was installed."""
    causal = causal_lm(model)
    if causal.config._attn_implementation == NAME:
        causal.set_attn_implementation(REPLACED)


def forward_arguments(forest: Forest, device: torch.device | str) -> dict[str, Any]:
    """What to add to `model(input_ids=ids_1L, ...)` for a row that holds `forest`."""
    device = torch.device(device)
    return {
        "position_ids": forest.position_ids_1L.to(device, non_blocking=True),
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
        "forest": ForestLayout(forest, device),
    }


@contextmanager
def padded_rows() -> Iterator[None]:
    """Keep transformers from searching position ids for packed sequences: padded rows have none, and a search reads the device."""
    masking_utils.find_packed_sequence_indices = _packed_sequences
    token = _rows_are_padded.set(True)
    try:
        yield
    finally:
        _rows_are_padded.reset(token)


def _packed_sequences(position_ids: Tensor) -> Tensor | None:
    """Return what transformers finds; None without a search where `padded_rows` is open in this thread."""
    return None if _rows_are_padded.get() else _find_packed_sequences(position_ids)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: ForestLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' registry."""
    if forest is None:
        return ALL_ATTENTION_FUNCTIONS[REPLACED](module, query, key, value, attention_mask, **kwargs)
    _check(module, query, attention_mask, kwargs)
    scale = kwargs.get("scaling")
    query, key, value = _autocast(query, key, value)
    return attend_forest(query, key, value, forest, query.shape[-1] ** -0.5 if scale is None else scale), None


def attend_forest(query: Tensor, key: Tensor, value: Tensor, forest: ForestLayout, scale: float) -> Tensor:
    """[1, L, H, F]: attention as the forest says, the way of the tensors' device.

    Nothing can be compiled for tensors without numbers: on CUDA plain causal attention stands in, which takes as much memory.
    """
    if forest.block_mask is not None and not isinstance(query, FakeTensor):
        return flex_attention_row(query, key, value, forest.block_mask, scale)
    width = value.shape[-1]
    # The kernel takes one width for queries and values; latent attention has narrower values.
    value = F.pad(value, (0, query.shape[-1] - width))
    if forest.block_mask is None:
        out = forest.calls(query).attend(query, key, value, scale)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True).transpose(
            1, 2
        )
    return out[..., :width]


def _unknown(kwargs: dict[str, Any]) -> list[str]:
    """Names of what a layer asks for that has a meaning which nobody here knows."""
    known = _WITHOUT_MEANING | {"scaling", "dropout", "is_causal"}
    return [key for key, value in kwargs.items() if key not in known and value is not None and value is not False]


def _check(module: nn.Module, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise ModelError for what a layer asks of its attention that would be ignored."""
    name = type(module).__name__
    if mask is None or mask.shape != (1, 1, 1, 1) or query.shape[0] != 1:
        raise ModelError(f"{name} changes its attention mask, which a row of several sequences does not have")
    if kwargs.get("dropout"):
        raise ModelError(f"{name} has attention dropout, which a row of several sequences cannot have: set it to 0")
    causal = kwargs.get("is_causal")
    if (getattr(module, "is_causal", True) if causal is None else causal) is False:
        raise ModelError(f"{name} is not causal, so its sequences cannot share a row")
    unknown = _unknown(kwargs)
    if unknown:
        raise ModelError(f"{name} passes {', '.join(unknown)} to its attention, which lowpeak does not know")


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """As autocast does for scaled_dot_product_attention, which a function of our own is not listed beside."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]
