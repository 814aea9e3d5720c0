"""KV cache of the native engine: one slot per sequence, written in place, and the prefill of prompts.

transformers' DynamicLayer concatenates, which copies the whole cache for every token. Here each sequence's tokens start at the
left of its slot, so sequences at different positions run together. A new sequence overwrites one that has ended; otherwise only
the last sequence moves, into a slot that stayed free. The buffer of a rollout is made once, for sequences of full length: one
that grows leaves blocks to torch's caching allocator that nothing else fits. What a slot holds depends on the kind of layer
(`slots.py`).
Shapes: P prompts, S slots, C columns, N running sequences (the first slots), L columns that they see.
A prompt is forwarded once for all sequences of its group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lowpeak.heads import transformers_model
from lowpeak.memory import return_cached_memory
from lowpeak.rollout.native.cache_layers import prompt_cache, storing_layers
from lowpeak.rollout.native.slots import Places

_CLEARED = 64  # columns that are set to zero at once
_ALIGNMENT = 16  # bytes of a part of the buffer
MASK_MULTIPLE = 8  # columns: attention's kernels copy masks whose rows begin elsewhere


def bucket_size(number: int) -> int:
    """Return the least bucket of at least `number`: a multiple of 8 and of a sixteenth of the power of two below it."""
    step = max(MASK_MULTIPLE, 1 << max(0, number.bit_length() - 5))
    return -(-number // step) * step


def text_config(model: nn.Module) -> Any:
    """Return the config of the model's text decoder."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def cache_argument(model: nn.Module) -> str:
    """Return the name of the KV cache in the model's forward."""
    # transformers 5.24 renamed `past_key_values` to `cache`.
    accepted = inspect.signature(transformers_model(model).forward).parameters
    return "past_key_values" if "past_key_values" in accepted else "cache"


def call_with_cache(model: nn.Module, cache: Cache, ids_NT: Tensor, mask: Any, positions_NT: Tensor | None) -> Tensor:
    """Return the logits [N, V] of the last token of each sequence, and add the tokens to the cache."""
    arguments = {cache_argument(model): cache, "position_ids": positions_NT}
    if "position_ids" not in inspect.signature(transformers_model(model).forward).parameters:
        del arguments["position_ids"]  # no layer attends
    output = model(input_ids=ids_NT, attention_mask=mask, use_cache=True, logits_to_keep=1, **arguments)
    logits_NV: Tensor = output.logits[:, -1]
    return logits_NV


def parameter_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter."""
    # A quantized model's other parameters are packed integers.
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


class SlotCache(Cache):
    """Slots for the sequences of a rollout, in one buffer that is made once.

    Forwards see buckets of its columns, so that their shapes repeat.

        cache.reserve(num_slots, num_columns, 0)             # once, and when shorter sequences leave room for more slots
        cache.place(prefilled, prompts, lengths, slots)      # the first call makes the buffer
        cache.begin(columns_N, num_columns)                  # before each forward of one token per sequence
        cache.begin_feed(first_slot, starts, lengths)        # before one of several
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.num_slots = self.num_columns = 0
        self._stored: list[Any] = []  # the layers that keep something
        self._num_elements: list[int] = []  # of the buffer's parts
        self._num_cleared = 0  # columns without uninitialised values
        self._view = (0, 0, 0)  # first slot, sequences and columns of the layers' views

    def most_slots(self, num_columns: int) -> int:
        """Return the slots of so many columns for which the buffer has room."""
        needed = [number for layer in self._stored for number in layer.num_elements(1, num_columns)]
        return min((number // least for number, least in zip(self._num_elements, needed, strict=True)), default=0)

    def reserve(self, num_slots: int, num_columns: int, num_rows: int) -> None:
        """Have at least so many slots of `num_columns`, never more than before; the first `num_rows` keep their contents."""
        if num_slots <= self.num_slots:
            return
        assert not self.layers or num_slots <= self.most_slots(num_columns), "the caller must limit slots to the buffer"
        self.num_slots, self.num_columns = num_slots, num_columns
        self._num_cleared = min(self._num_cleared, num_columns)
        self._view = (0, 0, 0)
        for layer in self._stored:
            layer.lay_out(num_slots, num_columns, num_rows, self._num_cleared)

    def allocate(self, like: Cache) -> None:
        """Make the buffer of all layers, for slots of these layers' kinds and shapes."""
        self.layers = [layer.make_slots() if hasattr(layer, "make_slots") else layer for layer in like.layers]
        self._stored = storing_layers(self)
        # Blocks of a training step or of a prefill are too small for it, and would stay beside it.
        return_cached_memory(self._stored[0].device)
        sizes = [layer.num_elements(self.num_slots, self.num_columns) for layer in self._stored]
        self._num_elements = [number for each in sizes for number in each]
        dtypes = [layer.dtype for layer, each in zip(self._stored, sizes, strict=True) for _ in each]
        parts = iter(_parts_of_buffer(self._num_elements, dtypes, self._stored[0].device))
        for layer, each in zip(self._stored, sizes, strict=True):
            layer.attach([next(parts) for _ in each])
            layer.lay_out(self.num_slots, self.num_columns, 0, 0)

    def begin(self, columns_N: Tensor, num_columns: int) -> int:
        """Prepare a forward: the token of sequence n goes to column `columns_N[n]`, one of the first `num_columns`.

        Returns the columns that the forward sees, a bucket of them.
        """
        num_rows, seen = len(columns_N), min(self.num_columns, bucket_size(num_columns))
        rows_N = torch.arange(num_rows, device=columns_N.device)

        def places(width: int) -> Places:
            columns = columns_N if width == self.num_columns else columns_N % width
            return Places(rows_N * width + columns)

        self._prepare((0, num_rows, seen), places)
        return seen

    def begin_feed(self, first_slot: int, starts: Sequence[int], lengths: Sequence[int]) -> int:
        """Prepare a forward of `lengths[n]` tokens of slot `first_slot + n`, left-aligned, for its columns from `starts[n]` on.

        Returns the columns that the forward sees: those of the longest sequence.
        """
        tokens_T, device = torch.arange(max(lengths)), self._stored[0].device
        slots_N1, starts_N1, lengths_N1 = torch.tensor([range(first_slot, first_slot + len(starts)), starts, lengths])[
            ..., None
        ]
        num_columns = max(start + length for start, length in zip(starts, lengths, strict=True))

        def places(width: int) -> Places:
            # Only a ring's last tokens stay.
            is_real_NT = (tokens_T < lengths_N1) & (tokens_T >= lengths_N1 - width)
            index_M = (slots_N1 * width + (starts_N1 + tokens_T) % width)[is_real_NT]
            source_M = is_real_NT.flatten().nonzero()[:, 0]
            return Places(index_M.to(device), source_M.to(device), len(tokens_T), num_columns > width)

        self._prepare((first_slot, len(starts), num_columns), places)
        return num_columns

    def _prepare(self, view: tuple[int, int, int], make_places: Callable[[int], Places]) -> None:
        self._clear(view[2])
        made: dict[int, Places] = {}
        for layer in self._stored:
            width = layer.width(self.num_columns)
            if width not in made:
                made[width] = make_places(width)
            layer.places = made[width]
            if self._view != view:
                layer.set_view(*view)
        self._view = view

    def _clear(self, num_columns: int) -> None:
        """Set columns to zero before they are seen: masked ones are multiplied by zero, and may not contain NaN."""
        if num_columns <= self._num_cleared:
            return
        start = self._num_cleared
        self._num_cleared = min(self.num_columns, -(-num_columns // _CLEARED) * _CLEARED)
        for layer in self._stored:
            layer.clear(start, self._num_cleared)

    def move(self, targets: Sequence[int], sources: Sequence[int], num_columns: int) -> None:
        """Copy slots onto others; all sources are read before any target is written."""
        if targets and num_columns and self._stored:
            target_M, source_M = torch.tensor([targets, sources]).to(self._stored[0].device, non_blocking=True)
            for layer in self._stored:
                layer.move(target_M, source_M, num_columns)

    def empty(self, slots: Sequence[int]) -> None:
        """Let sequences begin in these slots without a prefill."""
        if slots:
            slots_N = torch.tensor(slots).to(self._stored[0].device, non_blocking=True)
            for layer in self._stored:
                layer.empty(slots_N)

    def can_shorten(self, num_cached: int, num_kept: int) -> bool:
        """Return whether a slot with `num_cached` tokens can go on after its first `num_kept`."""
        return all(layer.can_shorten(num_cached, num_kept) for layer in self._stored)

    def place(self, prefilled: Cache, prompts: Sequence[int], lengths: Sequence[int], slots: Sequence[int]) -> None:
        """Copy right-aligned prefilled prompts to the left of slots: prompt `prompts[i]` to `slots[i]`."""
        if not self.layers:
            self.allocate(prefilled)
        longest, device = max(lengths), self._stored[0].device
        prompts_N1, lengths_N1 = torch.tensor([prompts, [lengths[prompt] for prompt in prompts]])[..., None]
        # A longer prompt may have no sequence that goes on, and then the slots need not have its columns.
        num_columns = max(lengths[prompt] for prompt in prompts)
        self._clear(num_columns)
        slots_N, prompts_N = (torch.tensor(each).to(device, non_blocking=True) for each in (slots, prompts))
        made: dict[int, Tensor] = {}
        for layer, mine in zip(storing_layers(prefilled), self._stored, strict=True):
            width = mine.width(self.num_columns)
            if width not in made:
                # The newest token of each column; the remainder of a shorter prompt's slot is masked until it is overwritten.
                last_N1 = lengths_N1 - 1
                columns_NL = (last_N1 - (last_N1 - torch.arange(min(width, num_columns))) % width).clamp(min=0)
                index_NL = prompts_N1 * longest + longest - lengths_N1 + columns_NL
                made[width] = index_NL.to(device, non_blocking=True)
            mine.put(layer, slots_N, prompts_N, made[width])


def _parts_of_buffer(sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    """Return parts of a new buffer, with these numbers of elements."""
    num_bytes = [size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    padded = [-(-number // _ALIGNMENT) * _ALIGNMENT for number in num_bytes]
    # On a CPU the kernel provides pages when they are written.
    parts = torch.empty(sum(padded), dtype=torch.uint8, device=device).split(padded)
    return [part[:number].view(dtype) for part, number, dtype in zip(parts, num_bytes, dtypes, strict=True)]


def select_prompt(prefilled: Cache, index: int, length: int) -> Cache:
    """Return a copy of one prompt of a prefill."""
    return Cache(
        layers=[layer.select(index, length) if hasattr(layer, "select") else layer for layer in prefilled.layers]
    )


MAX_PREFILL = 16_384  # padded prompt tokens per forward, because activations take more bytes per token than the cache

Ids = Sequence[Sequence[int]]


def split_prefill(prompts: Sequence[int], lengths: Sequence[int], max_tokens: int = MAX_PREFILL) -> Iterator[list[int]]:
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
    cache = prompt_cache(text_config(model))
    return call_with_cache(model, cache, left_pad(prompts, device), mask_PL, positions_PL), cache


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
