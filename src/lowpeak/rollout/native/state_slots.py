"""Slots for the states of recurrent and convolution layers, and for layers that have them and keys and values.

A state is of all tokens so far: it does not grow, cannot be shortened, and takes one sequence per forward of several tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from lowpeak.attention import FULL, Span
from lowpeak.rollout.native.slots import MAX_COPIED, PromptLayer, SlotLayer

_ALIGNMENT = 16  # bytes


class _State(NamedTuple):
    """One of a layer's states: its dictionary and number, and the shape and dtype of a sequence's."""

    name: str
    number: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot, rounded up."""
        return -(-self.shape.numel() * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class PromptStates(LinearAttentionLayer):
    """States after prompts in one layer, [P, ...], as from the model."""

    def make_slots(self) -> StateSlots:
        """Return slots for this layer's states, without memory yet."""
        return StateSlots(self)

    def select(self, index: int, length: int) -> PromptStates:
        """Return a copy of one prompt."""
        selected = type(self)(self.number_of_states)
        _select_states(self, selected, index)
        return selected


class PromptKeysAndStates(PromptLayer, LinearAttentionLayer):
    """Keys and values of prompts, and states after them, in one layer."""

    def __init__(self, number_of_states: int, span: Span = FULL) -> None:
        PromptLayer.__init__(self, span)
        LinearAttentionLayer.__init__(self, number_of_states)

    @property
    def states(self) -> PromptKeysAndStates:
        return self

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def make_slots(self) -> SlotLayer:
        """Return slots for this layer, without memory yet."""
        return KeyAndStateSlots(self)

    def select(self, index: int, length: int) -> PromptLayer:
        """Return a copy of one prompt."""
        selected = PromptKeysAndStates(self.number_of_states, self.span)
        selected.update(*(x[index : index + 1, :, -length:].clone() for x in (self.keys, self.values)))
        _select_states(self, selected, index)
        return selected


def _select_states(source: LinearAttentionLayer, target: LinearAttentionLayer, index: int) -> None:
    for state in _states(source):
        getattr(target, state.name)[state.number] = getattr(source, state.name)[state.number][index : index + 1].clone()
    target.conv_kernel_size = dict(source.conv_kernel_size)


def _states(layer: LinearAttentionLayer) -> Iterator[_State]:
    for name in ("conv_states", "recurrent_states"):
        for number, state in getattr(layer, name).items():
            if state is not None:
                yield _State(name, number, state.shape[1:], state.dtype)


class StateSlots(LinearAttentionLayer):
    """States of one layer, as views [S, ...] of bytes, because convolutions and recurrences may have different dtypes.

    transformers writes the states of the visible slots in place.
    """

    def __init__(self, like: LinearAttentionLayer) -> None:
        super().__init__(like.number_of_states)
        self.has_previous_state = dict.fromkeys(range(like.number_of_states), True)  # that of an empty sequence is zero
        self.dtype, self._states = torch.uint8, list(_states(like))
        self.device = next(getattr(like, each.name)[each.number].device for each in self._states)
        self.conv_kernel_size = dict(like.conv_kernel_size)
        for each in self._states:
            getattr(self, f"is_{each.name}_initialized")[each.number] = True
        self.buffers: list[Tensor] = []

    def width(self, num_columns: int) -> int:
        """Return 1: a state is that of the newest token."""
        return 1

    def num_elements(self, num_slots: int, num_columns: int) -> list[int]:
        return [num_slots * each.num_bytes for each in self._states]

    def attach(self, parts: Sequence[Tensor]) -> None:
        """Use these parts of a buffer."""
        for part, each in zip(parts, self._states, strict=True):
            bytes_SB = part.view(-1, each.num_bytes)[:, : each.shape.numel() * each.dtype.itemsize]
            self.buffers.append(bytes_SB.view(each.dtype).unflatten(1, each.shape))

    def set_view(self, first_slot: int, num_rows: int, num_columns: int) -> None:
        """Set the visible sequences."""
        for buffer, each in zip(self.buffers, self._states, strict=True):
            getattr(self, each.name)[each.number] = buffer[first_slot : first_slot + num_rows]

    def lay_out(self, num_slots: int, num_columns: int, num_rows: int, kept: int) -> None:
        """Show the slots that stay; their states do not depend on columns."""
        self.set_view(0, num_rows, 0)

    def clear(self, start: int, stop: int) -> None:
        """Do nothing: states have no columns."""

    def empty(self, slots_N: Tensor) -> None:
        """Set states to those before the first token."""
        for buffer in self.buffers:
            buffer.index_fill_(0, slots_N, 0.0)

    def put(self, prefilled: LinearAttentionLayer, slots_N: Tensor, prompts_N: Tensor, index_NL: Tensor) -> None:
        """Copy the states of these prefilled prompts to slots."""
        for buffer, each in zip(self.buffers, self._states, strict=True):
            state = getattr(prefilled, each.name)[each.number]
            num_rows = max(1, MAX_COPIED // each.shape.numel())
            for slots_n, part in zip(slots_N.split(num_rows), prompts_N.split(num_rows), strict=True):
                buffer.index_copy_(0, slots_n, state.index_select(0, part))

    def move(self, target_M: Tensor, source_M: Tensor, num_columns: int) -> None:
        """Copy slots onto others; all sources are read before any target is written."""
        for buffer in self.buffers:
            flat = buffer.flatten(1)
            for part in flat.split(max(1, MAX_COPIED // len(target_M)), dim=1):
                part.index_copy_(0, target_M, part.index_select(0, source_M))

    def can_shorten(self, num_cached: int, num_kept: int) -> bool:
        """Return whether a slot still holds the state after its first `num_kept` tokens: only if these are all."""
        return num_cached == num_kept


class KeyAndStateSlots(SlotLayer, LinearAttentionLayer):
    """Keys and values of one layer; its `states` are stored apart."""

    def __init__(self, like: PromptKeysAndStates) -> None:
        LinearAttentionLayer.__init__(self, like.number_of_states)
        SlotLayer.__init__(self, like)
        self.states = StateSlots(like)
        # The same dictionaries, in which `states` puts its views.
        for name in ("conv_states", "recurrent_states", "has_previous_state", "conv_kernel_size"):
            setattr(self, name, getattr(self.states, name))
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized"):
            setattr(self, name, getattr(self.states, name))
