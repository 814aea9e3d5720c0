"""The KV cache of a batch: layers with room to grow, filled from a prefill of each prompt, rearranged as rows change.

transformers' DynamicLayer concatenates, which copies the whole cache for every token. Here a token is written into a
buffer, and the buffer is copied once per `ROOM` tokens or where rows leave and enter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

ROOM = 64  # tokens that a buffer is longer than what it must hold, where it may still grow by so many


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, `[rows, heads, tokens, width]`: views of buffers that may be longer.

    It starts with `length` tokens, to be filled in by its maker, and never holds more than `capacity`.
    """

    def __init__(self, like: DynamicLayer, num_rows: int, length: int, capacity: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = like.keys.dtype, like.keys.device, True
        self._capacity = capacity
        self._buffers = [self._buffer(states, num_rows, length) for states in (like.keys, like.values)]
        self._show(length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind the others; all keys and values."""
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if stop > self._buffers[0].shape[-2]:
            self._move(stop)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:stop, :] = states
        self._show(stop)
        return self.keys, self.values

    def arrange(self, kept: Tensor, num_rows: int, length: int, capacity: int) -> None:
        """The last `length` columns of the rows `kept`, in that order, and rows behind them for a maker to fill in."""
        self._capacity = capacity
        used = self.get_seq_length()
        shared = min(used, length)
        for i, old in enumerate(self._buffers):
            new = self._buffer(old, num_rows, length)
            new[: len(kept), :, : length - shared] = 0
            new[: len(kept), :, length - shared : length] = old[kept, :, used - shared : used]
            self._buffers[i] = new
        self._show(length)

    def _move(self, length: int) -> None:
        """New buffers for `length` tokens and room, with the same content; keys, then values: never both twice."""
        used = self.get_seq_length()
        for i, old in enumerate(self._buffers):
            new = self._buffer(old, old.shape[0], length)
            new[..., :used, :] = old[..., :used, :]
            self._buffers[i] = new

    def _buffer(self, like: Tensor, num_rows: int, length: int) -> Tensor:
        return like.new_empty(num_rows, like.shape[1], min(length + ROOM, self._capacity), like.shape[3])

    def _show(self, length: int) -> None:
        self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)


class SlotCache(Cache):
    """The cache of the rows in the batch: all end in the same column, shorter ones have zeros before them."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._shape = (0, 0, 0)

    def arrange(self, kept: Tensor, num_rows: int, length: int, capacity: int) -> None:
        """Keep the last `length` columns of the rows `kept`, in that order, with `place` to fill those up to `num_rows`.

        No layer holds more than `capacity` columns before the next time.
        """
        self._shape = (num_rows, length, capacity)
        if not len(kept):
            self.layers.clear()
        for layer in self.layers:
            layer.arrange(kept, *self._shape)

    def place(self, prefilled: DynamicCache, rows: slice, prompts: Tensor) -> None:
        """Copy prompts `prompts` of a prefill, one for each of `rows`, to the right end of the columns."""
        for i, layer in enumerate(prefilled.layers):
            if i == len(self.layers):
                self.layers.append(GrowingLayer(layer, *self._shape))
            for target, states in ((self.layers[i].keys, layer.keys), (self.layers[i].values, layer.values)):
                first = target.shape[-2] - states.shape[-2]
                target[rows, :, first:] = states[prompts]
                # A masked column is multiplied by a probability of zero, which only what is finite survives.
                target[rows, :, :first] = 0
