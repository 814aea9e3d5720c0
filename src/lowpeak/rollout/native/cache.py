"""KV cache of the native engine: one slot per sequence, written in place, and the prefill of prompts.

transformers' DynamicLayer concatenates, which copies the whole cache for every token. Here each sequence's tokens start at the
left of its slot, so sequences at different positions run together. A new sequence overwrites one that has ended; otherwise only
the last sequence moves, into a slot that stayed free. Buffers are copied once per `ROOM` columns.
Shapes: S slots, C columns, K KV heads, W width of a head, N running sequences (the first slots), L columns that they use.
A prompt is forwarded once for all sequences of its group."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from lowpeak.errors import EngineError
from lowpeak.heads import transformers_model

ROOM = 64  # columns by which a buffer grows
# Elements that are copied into slots at once: the copy's temporary is not counted in the cache's budget.
MAX_COPIED = 1 << 22


def bytes_per_token(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of one token's keys and values.

        layers x KV heads x (key width + value width) x itemsize

    `dtype` is the cache's. None stands for the parameters' dtype, but at least two bytes: 8-bit parameters have wider
    keys and values. Under autocast keys and values are narrower than the parameters.

    If a config does not name its KV heads or their width, they are the attention heads and `hidden_size / heads`;
    without attention heads (recurrent models) the keys and values have the hidden size.
    """
    config = text_config(model)
    hidden = _attribute(config, "hidden_size")
    layers = _attribute(config, "num_hidden_layers")
    if hidden is None or layers is None:
        raise EngineError(
            f"{type(config).__name__} does not define hidden_size and num_hidden_layers, so the memory of its KV cache "
            "is unknown: generate with vLLM (use_vllm=True)."
        )
    heads = _attribute(config, "num_attention_heads") or 1
    kv_heads = _attribute(config, "num_key_value_heads") or heads
    itemsize = dtype.itemsize if dtype is not None else max(2, parameter_dtype(model).itemsize)
    return layers * kv_heads * _key_and_value_width(config, hidden // heads) * itemsize


def _key_and_value_width(config: Any, width: int) -> int:
    """Return the width of one head's key plus value; `width` is the default of each."""
    width = _attribute(config, "head_dim") or width
    latent = (_attribute(config, "qk_nope_head_dim") or 0) + (_attribute(config, "qk_rope_head_dim") or 0)
    return (latent or width) + (_attribute(config, "v_head_dim") or width)


def text_config(model: nn.Module) -> Any:
    """Return the config of the model's text decoder."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def cache_argument(model: nn.Module) -> str:
    """Return the name of the KV cache in the model's forward."""
    # transformers 5.24 renamed `past_key_values` to `cache`.
    accepted = inspect.signature(transformers_model(model).forward).parameters
    return "past_key_values" if "past_key_values" in accepted else "cache"


def _attribute(config: Any, name: str) -> int | None:
    try:
        return getattr(config, name, None)
    except RuntimeError:
        # transformers raises if layers differ in the attribute: the largest value bounds all layers.
        return max((getattr(layer, name, None) or 0 for layer in config.per_layer_config), default=None)


def parameter_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter."""
    # A quantized model's other parameters are packed integers.
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


class PromptLayer(DynamicLayer):
    """Keys and values of prompts in one layer, [P, K, L, W], as from the model.

    They are written once and never extended.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values; keys in the values' dtype.

        Under autocast rotary embedding leaves keys in fp32, and attention rounds them to the values' dtype.
        DynamicLayer would widen the values instead and take twice the bytes.
        """
        self.keys, self.values = key_states.to(value_states.dtype), value_states
        self.dtype, self.device, self.is_initialized = self.values.dtype, self.values.device, True
        return self.keys, self.values


class SlotLayer(DynamicLayer):
    """Keys and values of one layer in two buffers [S, C, K, W].

    A sequence's newest token is contiguous in this layout.
    """

    def __init__(self, like: PromptLayer, num_slots: int, num_columns: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = like.values.dtype, like.values.device, True
        shapes = [(num_slots, num_columns, x.shape[1], x.shape[3]) for x in (like.keys, like.values)]
        self.buffers = [like.values.new_zeros(shape) for shape in shapes]
        self.set_view(num_slots, 0, None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token [N, K, 1, W] per sequence at the index of `set_view`.

        Returns all keys and values [N, K, L, W].
        """
        assert self._index_N is not None, "`SlotCache.begin` sets the index"
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.flatten(0, 1).index_copy_(0, self._index_N, states[:, :, 0].to(buffer.dtype))
        return self.keys, self.values

    def set_view(self, num_rows: int, num_columns: int, index_N: Tensor | None) -> None:
        """Set the visible sequences and columns; `index_N` is the newest tokens' index into slots x columns."""
        self._index_N = index_N
        # Masked columns are multiplied by zero, so the buffers must not contain NaN: they are initialised with zeros.
        self.keys, self.values = (buffer[:num_rows, :num_columns].transpose(1, 2) for buffer in self.buffers)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Return the filled columns before the newest one."""
        return max(0, self.keys.shape[-2] - 1)

    def resize(self, num_slots: int, num_columns: int, num_rows: int) -> None:
        """Resize the buffers and keep their first sequences."""
        # One buffer after the other, so that no second copy of both exists; views keep the old ones in memory.
        del self.keys, self.values
        for i, old in enumerate(self.buffers):
            kept = min(num_columns, old.shape[1])
            new = old.new_zeros(num_slots, num_columns, *old.shape[2:])
            new[:num_rows, :kept] = old[:num_rows, :kept]
            self.buffers[i] = new
            del old
        self.set_view(num_rows, 0, None)


class SlotCache(Cache):
    """Slots of a batch, with at most `max_tokens` tokens in total and `max_columns` columns."""

    def __init__(self, max_tokens: int, max_columns: int) -> None:
        super().__init__(layers=[])
        self.max_tokens = max_tokens
        self._max_columns = max_columns
        self.num_slots = self._num_columns = 0

    def reserve(self, num_slots: int, num_columns: int, num_rows: int) -> None:
        """Grow to at least these slots and columns; the first `num_rows` slots keep their contents."""
        if num_slots <= self.num_slots and num_columns <= self._num_columns:
            return
        self.num_slots = max(num_slots, self.num_slots)
        most = min(self._max_columns, self.max_tokens // self.num_slots)
        wanted = max(num_columns, self._num_columns)
        self._num_columns = min(most, -(-wanted // ROOM) * ROOM)
        assert num_columns <= self._num_columns, "the caller must limit slots so that their columns fit the budget"
        for layer in self.layers:
            layer.resize(self.num_slots, self._num_columns, num_rows)

    def begin(self, columns_N: Tensor, num_columns: int) -> None:
        """Prepare a forward: the token of sequence n goes to column `columns_N[n]`; no sequence has more than
        `num_columns`.
        """
        num_rows = len(columns_N)
        index_N = torch.arange(num_rows, device=columns_N.device) * self._num_columns + columns_N
        for layer in self.layers:
            layer.set_view(num_rows, num_columns, index_N)

    def move(self, targets: Sequence[int], sources: Sequence[int], num_columns: int) -> None:
        """Copy slots onto others; all sources are read before any target is written."""
        buffers = [buffer[:, :num_columns] for layer in self.layers for buffer in layer.buffers]
        if targets and buffers:
            target_M, source_M = torch.tensor([targets, sources]).to(buffers[0].device, non_blocking=True)
            for buffer in buffers:
                buffer.index_copy_(0, target_M, buffer.index_select(0, source_M))

    def place(self, prefilled: Cache, prompts: Sequence[int], lengths: Sequence[int], first_slot: int) -> None:
        """Copy right-aligned prefilled prompts to the left of the slots from `first_slot` on."""
        # The remainder of a shorter prompt's slot is masked until tokens overwrite it.
        longest, device = max(lengths), prefilled.layers[0].keys.device
        padding = torch.tensor([longest - lengths[prompt] for prompt in prompts])[:, None]
        columns_NL = (torch.arange(longest) + padding).clamp(max=longest - 1)
        index_NL = (torch.tensor(prompts)[:, None] * longest + columns_NL).to(device, non_blocking=True)
        for i, layer in enumerate(prefilled.layers):
            if i == len(self.layers):
                self.layers.append(SlotLayer(layer, self.num_slots, self._num_columns))
            for buffer, states in zip(self.layers[i].buffers, (layer.keys, layer.values), strict=True):
                _copy_prompts(buffer[first_slot:], states.transpose(1, 2).flatten(0, 1), index_NL)


def _copy_prompts(slots_SCKW: Tensor, states_TKW: Tensor, index_NL: Tensor) -> None:
    """Copy the tokens `index_NL` of a flattened prefill to the left of the first slots."""
    num_columns = index_NL.shape[1]
    num_rows = max(1, MAX_COPIED // (num_columns * states_TKW[0].numel()))
    for start, part in zip(range(0, len(index_NL), num_rows), index_NL.split(num_rows), strict=True):
        copied = states_TKW.index_select(0, part.flatten()).unflatten(0, part.shape)
        slots_SCKW[start : start + len(part), :num_columns] = copied


_MAX_TOKENS = 16_384  # padded prompt tokens per forward, because activations take more bytes per token than the cache

Ids = Sequence[Sequence[int]]


def split_prefill(prompts: Sequence[int], lengths: Sequence[int], max_tokens: int = _MAX_TOKENS) -> Iterator[list[int]]:
    """Yield the prompts of each forward, in order: as many as `max_tokens` padded tokens allow, at least one."""
    part: list[int] = []
    longest = 0
    for prompt in prompts:
        longest = max(longest, lengths[prompt])
        if part and longest * (len(part) + 1) > max_tokens:
            yield part
            part, longest = [], lengths[prompt]
        part.append(prompt)
    if part:
        yield part


def prefill_prompts(model: nn.Module, prompts: Ids, device: torch.device) -> tuple[Tensor, Cache]:
    """Return the logits [P, V] of each prompt's first new token, and right-aligned keys and values."""
    lengths = [len(ids) for ids in prompts]
    mask_PL = left_mask(lengths, device)
    positions_PL = None if mask_PL is None else (mask_PL.cumsum(dim=-1) - 1).clamp(min=0)
    cache = Cache(layer_class_to_replicate=PromptLayer)
    output = model(
        input_ids=left_pad(prompts, device),
        attention_mask=mask_PL,
        position_ids=positions_PL,
        use_cache=True,
        logits_to_keep=1,
        **{cache_argument(model): cache},
    )
    return output.logits[:, -1], cache


def left_pad(prompts: Ids, device: torch.device) -> Tensor:
    """Return right-aligned ids [P, L], padded with each prompt's first token.

    The padding is masked, and a repetition penalty applies to this token anyway.
    """
    length = max(len(ids) for ids in prompts)
    rows = [[ids[0]] * (length - len(ids)) + list(ids) for ids in prompts]
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def left_mask(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Return the mask [P, L] of left-padded sequences, 0 on padding; None without padding.

    Without a mask attention may use its fastest kernel, and transformers does not read from the device whether all is
    1.
    """
    num_columns = max(lengths)
    if min(lengths) == num_columns:
        return None
    first = torch.tensor([num_columns - length for length in lengths])[:, None]
    return (torch.arange(num_columns)[None, :] >= first).to(device, torch.int64, non_blocking=True)
