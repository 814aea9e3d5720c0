"""KV cache of the native engine: one slot per sequence, written in place, and the prefill of prompts.

transformers' DynamicLayer concatenates, which copies the whole cache for every token. Here each sequence's tokens start at the
left of its slot, so sequences at different positions run together. A new sequence overwrites one that has ended; otherwise only
the last sequence moves, into a slot that stayed free. The buffer of a rollout is made once, for sequences of full length: one
that grows leaves blocks to torch's caching allocator that nothing else fits.
Shapes: T tokens, S slots, C columns, K KV heads, W width of a head, N running sequences (the first slots), L columns that they see.
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
from lowpeak.memory import return_cached_memory

_CLEARED = 64  # columns that are set to zero at once
MASK_MULTIPLE = 8  # columns: attention's kernels copy masks whose rows begin elsewhere
# Elements that are copied into slots at once: the copy's temporary is not counted in the cache's budget.
MAX_COPIED = 1 << 22


def bucket_size(number: int) -> int:
    """Return the least bucket of at least `number`: a multiple of 8 and of a sixteenth of the power of two below it."""
    step = max(MASK_MULTIPLE, 1 << max(0, number.bit_length() - 5))
    return -(-number // step) * step


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
    """Keys and values of one layer, as views [S, C, K, W] of buffers [T, K, W].

    A sequence's newest token is contiguous in this layout.
    """

    def __init__(self, keys_TKW: Tensor, values_TKW: Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = values_TKW.dtype, values_TKW.device, True
        self._tokens = (keys_TKW, values_TKW)
        self.buffers = [tokens_TKW[:0].unflatten(0, (0, 1)) for tokens_TKW in self._tokens]
        # The newest tokens: their places in slots x columns, which of the forward's they are (None: all), and how many per slot.
        self.index_M: Tensor | None = None
        self.source_M: Tensor | None = None
        self.num_new = 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the newest tokens of [N, K, T, W] at `index_M`; return all keys and values [N, K, L, W]."""
        assert self.index_M is not None, "`SlotCache.begin` sets the index"
        for tokens_TKW, states in zip(self._tokens, (key_states, value_states), strict=True):
            states_MKW = states.transpose(1, 2).flatten(0, 1)
            if self.source_M is not None:
                states_MKW = states_MKW[self.source_M]
            tokens_TKW.index_copy_(0, self.index_M, states_MKW.to(self.dtype))
        return self.keys, self.values

    def set_view(self, first_slot: int, num_rows: int, num_columns: int) -> None:
        """Set the visible sequences and columns."""
        slots = slice(first_slot, first_slot + num_rows)
        self.keys, self.values = (buffer[slots, :num_columns].transpose(1, 2) for buffer in self.buffers)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Return the visible columns without the newest ones."""
        return max(0, self.keys.shape[-2] - self.num_new)

    def lay_out(self, num_slots: int, num_columns: int, num_rows: int, kept: int) -> None:
        """Divide the buffers into slots of at most as many columns as before; `num_rows` slots keep their first `kept`."""
        for i, tokens_TKW in enumerate(self._tokens):
            before, after = (
                self.buffers[i],
                tokens_TKW[: num_slots * num_columns].unflatten(0, (num_slots, num_columns)),
            )
            if before.shape[1] != num_columns:
                _move_rows(before[:num_rows, :kept], after)
            after[num_rows:, :kept].zero_()
            self.buffers[i] = after
        self.set_view(0, num_rows, 0)


class SlotCache(Cache):
    """Slots for the sequences of a rollout, in one buffer of at most `max_tokens` tokens that is made once.

    Forwards see buckets of its columns, so that their shapes repeat.

        cache.reserve(num_slots, num_columns, 0)        # once, and when shorter sequences leave room for more slots
        cache.place(prefilled, prompts, lengths, 0)     # the first call makes the buffer
        cache.begin(columns_N, num_columns)             # before each forward of one token per sequence
        cache.begin_feed(first_slot, starts, lengths)   # before one of several
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__(layers=[])
        self.max_tokens = max_tokens
        self.num_slots = self.num_columns = 0
        self._num_cleared = 0  # columns without uninitialised values
        self._view = (0, 0, 0)  # first slot, sequences and columns of the layers' views

    def reserve(self, num_slots: int, num_columns: int, num_rows: int) -> None:
        """Have at least so many slots of `num_columns`, never more than before; the first `num_rows` keep their contents.

        The first call sets `max_tokens` to those of the buffer.
        """
        if num_slots <= self.num_slots:
            return
        if not self.num_slots:
            self.max_tokens = num_slots * num_columns
        assert num_slots * num_columns <= self.max_tokens, "the caller must limit slots so that they fit the budget"
        self.num_slots, self.num_columns = num_slots, num_columns
        self._num_cleared = min(self._num_cleared, num_columns)
        self._view = (0, 0, 0)
        for layer in self.layers:
            layer.lay_out(num_slots, num_columns, num_rows, self._num_cleared)

    def allocate(self, like: Cache) -> None:
        """Make the buffer of all layers, for keys and values of these layers' shapes."""
        states = [states for layer in like.layers for states in (layer.keys, layer.values)]
        sizes = [self.max_tokens * x.shape[1] * x.shape[3] for x in states]
        # Blocks of a training step or of a prefill are too small for it, and would stay beside it.
        return_cached_memory(states[0].device)
        # On a CPU the kernel provides pages when they are written.
        parts = states[-1].new_empty(sum(sizes)).split(sizes)
        buffers = [part.view(-1, x.shape[1], x.shape[3]) for part, x in zip(parts, states, strict=True)]
        self.layers = [SlotLayer(*pair) for pair in zip(buffers[::2], buffers[1::2], strict=True)]
        for layer in self.layers:
            layer.lay_out(self.num_slots, self.num_columns, 0, 0)

    def begin(self, columns_N: Tensor, num_columns: int) -> int:
        """Prepare a forward: the token of sequence n goes to column `columns_N[n]`, one of the first `num_columns`.

        Returns the columns that the forward sees, a bucket of them.
        """
        num_rows, seen = len(columns_N), min(self.num_columns, bucket_size(num_columns))
        index_N = torch.arange(num_rows, device=columns_N.device) * self.num_columns + columns_N
        self._prepare((0, num_rows, seen), index_N, None, 1)
        return seen

    def begin_feed(self, first_slot: int, starts: Sequence[int], lengths: Sequence[int]) -> int:
        """Prepare a forward of `lengths[n]` tokens of slot `first_slot + n`, left-aligned, for its columns from `starts[n]` on.

        Returns the columns that the forward sees: those of the longest sequence.
        """
        tokens_T, device = torch.arange(max(lengths)), self.layers[0].device
        slots_N, starts_N, lengths_N = torch.tensor([range(first_slot, first_slot + len(starts)), starts, lengths])
        is_real_NT = tokens_T < lengths_N[:, None]
        index_M = ((slots_N * self.num_columns + starts_N)[:, None] + tokens_T)[is_real_NT]
        source_M = is_real_NT.flatten().nonzero()[:, 0]
        num_columns = int((starts_N + lengths_N).max())
        self._prepare((first_slot, len(starts), num_columns), index_M.to(device), source_M.to(device), len(tokens_T))
        return num_columns

    def _prepare(self, view: tuple[int, int, int], index_M: Tensor, source_M: Tensor | None, num_new: int) -> None:
        self._clear(view[2])
        for layer in self.layers:
            layer.index_M, layer.source_M, layer.num_new = index_M, source_M, num_new
            if self._view != view:
                layer.set_view(*view)
        self._view = view

    def _clear(self, num_columns: int) -> None:
        """Set columns to zero before they are seen: masked ones are multiplied by zero, and may not contain NaN."""
        if num_columns <= self._num_cleared:
            return
        start = self._num_cleared
        self._num_cleared = min(self.num_columns, -(-num_columns // _CLEARED) * _CLEARED)
        for layer in self.layers:
            for buffer in layer.buffers:
                buffer[:, start : self._num_cleared].zero_()

    def move(self, targets: Sequence[int], sources: Sequence[int], num_columns: int) -> None:
        """Copy slots onto others; all sources are read before any target is written."""
        buffers = [buffer[:, :num_columns] for layer in self.layers for buffer in layer.buffers]
        if targets and num_columns and buffers:
            target_M, source_M = torch.tensor([targets, sources]).to(buffers[0].device, non_blocking=True)
            for buffer in buffers:
                width = max(1, MAX_COPIED // (len(targets) * buffer[0, 0].numel()))
                for part in buffer.split(width, dim=1):
                    part.index_copy_(0, target_M, part.index_select(0, source_M))

    def place(self, prefilled: Cache, prompts: Sequence[int], lengths: Sequence[int], first_slot: int) -> None:
        """Copy right-aligned prefilled prompts to the left of the slots from `first_slot` on."""
        # The remainder of a shorter prompt's slot is masked until tokens overwrite it.
        longest, device = max(lengths), prefilled.layers[0].keys.device
        padding = torch.tensor([longest - lengths[prompt] for prompt in prompts])[:, None]
        # A longer prompt may have no sequence that goes on, and then the slots need not have its columns.
        num_columns = max(lengths[prompt] for prompt in prompts)
        columns_NL = (torch.arange(num_columns) + padding).clamp(max=longest - 1)
        index_NL = (torch.tensor(prompts)[:, None] * longest + columns_NL).to(device, non_blocking=True)
        if not self.layers:
            self.allocate(prefilled)
        self._clear(num_columns)
        for layer, mine in zip(prefilled.layers, self.layers, strict=True):
            for buffer, states in zip(mine.buffers, (layer.keys, layer.values), strict=True):
                _copy_prompts(buffer[first_slot:], states.transpose(1, 2).flatten(0, 1), index_NL)


def _copy_prompts(slots_SCKW: Tensor, states_TKW: Tensor, index_NL: Tensor) -> None:
    """Copy the tokens `index_NL` of a flattened prefill to the left of the first slots."""
    num_columns = index_NL.shape[1]
    num_rows = max(1, MAX_COPIED // (num_columns * states_TKW[0].numel()))
    for start, part in zip(range(0, len(index_NL), num_rows), index_NL.split(num_rows), strict=True):
        copied = states_TKW.index_select(0, part.flatten()).unflatten(0, part.shape)
        slots_SCKW[start : start + len(part), :num_columns] = copied


def _move_rows(before_NLKW: Tensor, after_SCKW: Tensor) -> None:
    """Copy rows to the left of narrower rows in the same memory."""
    # A part never reaches rows that are still to be copied.
    num_rows = max(1, MAX_COPIED // max(1, before_NLKW[:1].numel()))
    for start, part in zip(range(0, len(before_NLKW), num_rows), before_NLKW.split(num_rows), strict=False):
        after_SCKW[start : start + len(part), : part.shape[1]] = part.clone()


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
