"""Slots by kind of cache layer: one layer's part of each sequence, written in place.

A layer of the prefill (`PromptLayer`) names the class of its slots. `SlotCache` calls these methods of every layer that
stores something; a kind with other contents (a recurrent state) is one more pair of classes with the same methods:

    layer = prompt_layer.make_slots()
    layer.num_elements(num_slots, num_columns)            # of each of its parts of the cache's buffer
    layer.attach(parts)                                   # once
    layer.lay_out(num_slots, num_columns, num_rows, kept) # now, and when slots become narrower and more
    layer.clear(start, stop)                              # before columns are seen
    layer.empty(slots)                                    # of sequences that begin without a prefill
    layer.put(prompt_layer, slots, prompts, places)       # a prefill enters slots
    layer.set_view(first_slot, num_rows, num_columns)     # before a forward, with `places` of its newest tokens
    layer.move(targets, sources, num_columns)
    layer.can_shorten(num_cached, num_kept)               # whether the rest is as if later tokens had not come

Shapes: T tokens, S slots, C columns, K KV heads, W width of a head, N running sequences, L columns that they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from lowpeak.attention import FULL, Span

# Elements that are copied into slots at once: the copy's temporary is not counted in the cache's budget.
MAX_COPIED = 1 << 22


class PromptLayer(DynamicLayer):
    """Keys and values of prompts in one layer, [P, K, L, W], as from the model.

    They are written once and never extended.
    """

    def __init__(self, span: Span = FULL) -> None:
        super().__init__()
        self.span = span

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values; keys in the values' dtype.

        Under autocast rotary embedding leaves keys in fp32, and attention rounds them to the values' dtype.
        DynamicLayer would widen the values instead and take twice the bytes.
        """
        self.keys, self.values = key_states.to(value_states.dtype), value_states
        self.dtype, self.device, self.is_initialized = self.values.dtype, self.values.device, True
        return self.keys, self.values

    def make_slots(self) -> SlotLayer:
        """Return slots for this layer's keys and values, without memory yet."""
        return SlotLayer(self)

    def select(self, index: int, length: int) -> PromptLayer:
        """Return a copy of one prompt."""
        selected = PromptLayer(self.span)
        selected.update(*(x[index : index + 1, :, -length:].clone() for x in (self.keys, self.values)))
        return selected


class Places(NamedTuple):
    """Where a forward's newest tokens go in the layers of one width: their places among slots x columns.

    `source_M` are their indices among the forward's tokens, None for all. With `is_appended` a layer's new keys follow those
    of its slots, because tokens of the same forward overwrite some that others still attend to.
    """

    index_M: Tensor
    source_M: Tensor | None = None
    num_new: int = 1
    is_appended: bool = False


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, as views [S, C, K, W] of buffers [T, K, W].

    A sequence's newest token is contiguous in this layout. With a window or chunks of n tokens a slot is a ring of n
    columns: the token at position p is in column p % n. Rotary embedding comes before, so the order of columns has no effect.
    """

    places: Places

    def __init__(self, like: DynamicLayer) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = like.values.dtype, like.values.device, True
        self.span: Span = getattr(like, "span", FULL)
        self._shapes = [(x.shape[1], x.shape[3]) for x in (like.keys, like.values)]
        self._tokens: list[Tensor] = []
        self.buffers: list[Tensor] = []

    def width(self, num_columns: int) -> int:
        """Return the columns of a slot for sequences of so many tokens."""
        return min(num_columns, self.span.size or num_columns)

    def num_elements(self, num_slots: int, num_columns: int) -> list[int]:
        return [num_slots * self.width(num_columns) * heads * width for heads, width in self._shapes]

    def attach(self, parts: Sequence[Tensor]) -> None:
        """Use these parts of a buffer."""
        self._tokens = [part.view(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]
        self.buffers = [tokens_TKW[:0].unflatten(0, (0, 1)) for tokens_TKW in self._tokens]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the newest tokens of [N, K, T, W] to their places; return all keys and values [N, K, L, W]."""
        seen, places = [self.keys, self.values], self.places
        if places.is_appended:
            new = (key_states.to(self.dtype), value_states.to(self.dtype))
            seen = [torch.cat(pair, dim=2) for pair in zip(seen, new, strict=True)]
        for tokens_TKW, states in zip(self._tokens, (key_states, value_states), strict=True):
            states_MKW = states.transpose(1, 2).flatten(0, 1)
            if places.source_M is not None:
                states_MKW = states_MKW[places.source_M]
            tokens_TKW.index_copy_(0, places.index_M, states_MKW.to(self.dtype))
        return seen[0], seen[1]

    def set_view(self, first_slot: int, num_rows: int, num_columns: int) -> None:
        """Set the visible sequences and columns."""
        slots = slice(first_slot, first_slot + num_rows)
        self.keys, self.values = (buffer[slots, :num_columns].transpose(1, 2) for buffer in self.buffers)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Return the visible columns without the newest ones."""
        return max(0, self.keys.shape[-2] - self.places.num_new)

    def lay_out(self, num_slots: int, num_columns: int, num_rows: int, kept: int) -> None:
        """Divide the buffers into slots of at most as many columns as before; `num_rows` slots keep their first `kept`."""
        width = self.width(num_columns)
        for i, tokens_TKW in enumerate(self._tokens):
            before, after = self.buffers[i], tokens_TKW[: num_slots * width].unflatten(0, (num_slots, width))
            if before.shape[1] != width:
                _move_rows(before[:num_rows, :kept], after)
            after[num_rows:, :kept].zero_()
            self.buffers[i] = after
        self.set_view(0, num_rows, 0)

    def clear(self, start: int, stop: int) -> None:
        for buffer in self.buffers:
            buffer[:, start:stop].zero_()

    def empty(self, slots_N: Tensor) -> None:
        """Do nothing: leftovers of another sequence are masked."""

    def put(self, prefilled: DynamicLayer, slots_N: Tensor, prompts_N: Tensor, index_NL: Tensor) -> None:
        """Copy tokens `index_NL` of prefilled prompts, counted through all of them, to the first columns of these slots."""
        for buffer, states in zip(self.buffers, (prefilled.keys, prefilled.values), strict=True):
            states_TKW, num_columns = states.transpose(1, 2).flatten(0, 1), index_NL.shape[1]
            num_rows = max(1, MAX_COPIED // (num_columns * states_TKW[0].numel()))
            for slots_n, part in zip(slots_N.split(num_rows), index_NL.split(num_rows), strict=True):
                copied = states_TKW.index_select(0, part.flatten()).unflatten(0, part.shape)
                buffer[:, :num_columns].index_copy_(0, slots_n, copied)

    def move(self, target_M: Tensor, source_M: Tensor, num_columns: int) -> None:
        """Copy slots onto others; all sources are read before any target is written."""
        for buffer in self.buffers:
            width = max(1, MAX_COPIED // (len(target_M) * buffer[0, 0].numel()))
            for part in buffer[:, :num_columns].split(width, dim=1):
                part.index_copy_(0, target_M, part.index_select(0, source_M))

    def can_shorten(self, num_cached: int, num_kept: int) -> bool:
        """Return whether a slot with `num_cached` tokens has all that a token after the first `num_kept` attends to."""
        return self.span.size is None or num_cached <= max(0, self.span.start(num_kept)) + self.span.size


def _move_rows(before_NLKW: Tensor, after_SCKW: Tensor) -> None:
    """Copy rows to the left of narrower rows in the same memory."""
    # A part never reaches rows that are still to be copied.
    num_rows = max(1, MAX_COPIED // max(1, before_NLKW[:1].numel()))
    num_columns = after_SCKW.shape[1]
    for start, part in zip(range(0, len(before_NLKW), num_rows), before_NLKW.split(num_rows), strict=False):
        after_SCKW[start : start + len(part), : part.shape[1]] = part[:, :num_columns].clone()
