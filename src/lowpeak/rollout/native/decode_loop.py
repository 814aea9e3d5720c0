"""Decode loop of the native engine: sequences that generate together, each at its own position.

A group starts with one prefill of its prompt, after which the first tokens of all its completions are drawn at once.
Its sequences then take slots as they become free; for those without a slot the prefill of their prompt is kept, since slots
hold the newest tokens of a window alone. The running sequences always have the first slots, so that a forward computes no
others.
Shapes: P prompts, N running sequences, L columns of the cache that a step sees, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lowpeak.arguments import Sampling
from lowpeak.attention import (
    ATTENTION_NAME,
    EAGER_NAME,
    Span,
    continues_by_single_tokens,
    masks_by_type,
    mixers_of,
)
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache import (
    MASK_MULTIPLE,
    MAX_PREFILL,
    Ids,
    SlotCache,
    call_with_cache,
    left_pad,
    parameter_dtype,
    prefill_prompts,
    select_prompt,
    split_prefill,
    text_config,
)
from lowpeak.rollout.native.cache_bytes import sequence_bytes
from lowpeak.rollout.native.cache_layers import storing_layers
from lowpeak.rollout.native.decode_graphs import DecodeGraphs
from lowpeak.rollout.native.output import OutputBuffer
from lowpeak.rollout.native.scheduler import PromptQueue, SequenceId, sequence_keys
from lowpeak.rollout.sampling import TokenDraw
from lowpeak.rollout.uniforms import UniformDraws

# Attention implementations that add a mask to the scores accept a prepared mask, made once for all layers; flash kernels do not.
_ADDITIVE_MASKS = ("sdpa", "eager", ATTENTION_NAME, EAGER_NAME)
MAX_MASK = 1 << 24  # elements of a feed's mask


class RunningSequence(NamedTuple):
    """Sequence in a slot: its row of the output, its prompt and its offset.

    `offset` is the column of its newest token minus the steps of the loop so far.
    """

    row: int
    prompt: int
    offset: int


@dataclass(eq=False, repr=False)
class DecodeLoop:
    """Generation of all sequences of a call, in the slots of a cache that never exceeds the budget."""

    model: nn.Module
    queue: PromptQueue
    kv_cache_bytes: int
    prompts: Sequence[Prompt]
    sampling: Sampling
    output: OutputBuffer
    graphs: DecodeGraphs | None = None

    def __post_init__(self) -> None:
        self._running: list[RunningSequence] = []
        self._without_slot: deque[tuple[int, int]] = deque()  # rows and prompts of sequences that wait for a slot
        self._their_prompt: Cache | None = None  # its prefill
        self._ended: list[bool] = []
        self._num_steps = 0
        self._cache = SlotCache()
        num_rows = len(self.prompts) * self.sampling.num_generations
        self._draws = UniformDraws(num_rows, self.sampling, self.output.device)
        self._inputs = DecodeInputs(self.model, [prompt.ids for prompt in self.prompts], self.sampling, self.output)

    def run(self) -> None:
        """Generate all sequences into `output`; completion c of prompt p is row `p x generations + c`."""
        # The only host synchronisation is one small read per step: which sequences have ended.
        while self._admit():
            self._step()

    def rehearse_wave(self) -> None:
        """Admit sequences, run the first step and the last; then end all sequences."""
        last = self.sampling.max_new_tokens - 2
        if self._admit():
            start = self._num_steps
            for step in sorted({0, max(0, last)}):
                self._num_steps = start + step
                self._step()
        self._ended = [True] * len(self._running)

    def _admit(self) -> bool:
        """Remove ended sequences and start waiting ones; return whether any sequence runs."""
        changed = any(self._ended)
        if changed:
            self._refill_slots()
        # Only one group at a time may have sequences without a slot, so that a running sequence always has their prompt.
        while not self._without_slot and (prompts := self.queue.take(self._num_slots() - len(self._running))):
            changed = True
            num_prefilled = 0
            for part in split_prefill(prompts, self.queue.lengths):
                num_prefilled += len(part)
                self._start(part, len(prompts) - num_prefilled)
        if changed and self._running:
            self._inputs.restart([sequence.row for sequence in self._running])
        return bool(self._running)

    def _step(self) -> None:
        num_columns = self._num_columns()
        self._ended = self._inputs.step(self._cache, num_columns, self._draws, self.graphs)
        self._num_steps += 1

    def _num_columns(self) -> int:
        """Return the columns that the running sequences use, including their newest tokens."""
        return self._num_steps + max((sequence.offset for sequence in self._running), default=0) + 1

    def _num_slots(self, entering: Sequence[int] = ()) -> int:
        """Return the slots that the budget allows with the prompts in the loop and those that are `entering`."""
        return self.queue.num_slots([*self._started(), *entering])

    def _started(self) -> list[int]:
        return [sequence.prompt for sequence in self._running] + [prompt for _, prompt in self._without_slot]

    def _refill_slots(self) -> None:
        """Give ended sequences' slots to waiting ones, and fill remaining gaps with the last sequences."""
        num_used = len(self._running)
        free = deque(slot for slot, ended in enumerate(self._ended) if ended)
        running = {slot: sequence for slot, sequence in enumerate(self._running) if not self._ended[slot]}
        self._running, self._ended = list(running.values()), []
        num_slots = self._num_slots()
        entered: list[int] = []
        while self._without_slot and len(running) < num_slots:
            slot = free.popleft() if free else len(running)
            running[slot] = self._entering(*self._without_slot.popleft())
            entered.append(slot)
        sources = _close_gaps(running, free)
        self._running = [running[slot] for slot in range(len(running))]
        if entered:
            self._reserve(num_slots, num_used)
        self._cache.move(list(sources), list(sources.values()), self._num_columns())
        if entered:
            assert self._their_prompt is not None, "`_start` keeps it"
            prompt = self._running[entered[0]].prompt
            self._cache.place(self._their_prompt, [0] * len(entered), [len(self.prompts[prompt].ids)], entered)
        if not self._without_slot:
            self._their_prompt = None

    def _start(self, prompts: Sequence[int], num_following: int) -> None:
        """Prefill prompts, draw the first tokens of their groups, and place as many sequences as there are slots.

        `num_following` prompts start after them, before the next step.
        """
        logits_PV, prefilled = prefill_prompts(self.model, [self.prompts[i].ids for i in prompts], self.output.device)
        if not self._cache.layers:
            self._set_budget(storing_layers(prefilled)[0].dtype)
        started = self._first_tokens(prompts, logits_PV)
        num_used, num_slots = len(self._running), self._num_slots(prompts)
        placed = started[: num_slots - num_used]
        self._running += [self._entering(row, prompt) for row, prompt in placed]
        self._without_slot.extend(started[len(placed) :])
        index_of_prompt = {prompt: i for i, prompt in enumerate(prompts)}
        if self._without_slot:
            prompt = self._without_slot[0][1]
            self._their_prompt = select_prompt(prefilled, index_of_prompt[prompt], len(self.prompts[prompt].ids))
        if placed:
            self._reserve(num_slots, num_used, num_following * self.sampling.num_generations)
            indices = [index_of_prompt[prompt] for _, prompt in placed]
            lengths = [len(self.prompts[i].ids) for i in prompts]
            self._cache.place(prefilled, indices, lengths, range(num_used, len(self._running)))

    def _set_budget(self, dtype: torch.dtype) -> None:
        """Count the budget in the cache's dtype, which under autocast is narrower than the parameters'."""
        # Without a cycle of references, in which the cache would outlive the loop.
        budget, model = self.kv_cache_bytes, self.model
        self.queue.limit_slots(lambda tokens: budget // sequence_bytes(model, tokens, dtype))

    def _first_tokens(self, prompts: Sequence[int], logits_PV: Tensor) -> list[tuple[int, int]]:
        """Draw the first token of each sequence of these groups; return rows and prompts of those that continue."""
        size = self.sampling.num_generations
        sequences = [SequenceId(prompt, completion) for prompt in prompts for completion in range(size)]
        rows = [sequence.prompt * size + sequence.completion for sequence in sequences]
        self._draws.make(rows, sequence_keys(sequences, self.prompts, self.sampling))
        self._inputs.restart(rows)
        rows_N, written_N = self._inputs.rows_N, self._inputs.written_N
        sources_N = torch.arange(len(prompts), device=rows_N.device).repeat_interleave(size)
        uniforms_N = self._draws.at(rows_N, written_N)
        banned = self.output.banned(written_N)
        draw = TokenDraw(logits_PV, self.sampling, uniforms_N, self._inputs.history(0), sources_N, banned)
        ended = self.output.add(rows_N, draw, len(rows))
        return [(row, sequence.prompt) for row, sequence, end in zip(rows, sequences, ended, strict=True) if not end]

    def _entering(self, row: int, prompt: int) -> RunningSequence:
        return RunningSequence(row, prompt, len(self.prompts[prompt].ids) - self._num_steps)

    def _reserve(self, num_slots: int, num_used: int, num_following: int = 0) -> None:
        """Reserve slots for all sequences that may still run, as wide as the longest started one may become."""
        most = len(self._running) + len(self._without_slot) + num_following + self.queue.num_rows
        self._cache.reserve(min(num_slots, most), self.queue.slot_columns(self._started()), num_used)
        if self._cache.layers:
            self.queue.limit_slots(self._cache.most_slots)


def _close_gaps(running: dict[int, RunningSequence], free: Iterable[int]) -> dict[int, int]:
    """Move the last sequences into earlier free slots; return the source slot of each target slot."""
    sources: dict[int, int] = {}
    for slot in free:
        last = max(running, default=-1)
        if slot < last:
            running[slot], sources[slot] = running.pop(last), last
    return sources


class DecodeInputs:
    """Model inputs of one decode step, on the device; a token's column in the cache is its position.

    Row r of the output continues prompt `r // num_generations`.
    """

    def __init__(self, model: nn.Module, prompts: Ids, sampling: Sampling, output: OutputBuffer) -> None:
        self._model = model
        self._sampling = sampling
        self._size = sampling.num_generations
        self._output = output
        self._device = output.device
        self._lengths_P, self._last_P = self._lengths_and_last(prompts)
        needs_history = sampling.repetition_penalty != 1 and len(prompts) > 0
        self._prompts_PL = left_pad(prompts, self._device) if needs_history else None
        self._config, self._mask_dtype = text_config(model), mask_dtype(model)
        self._continues_by_single_tokens = continues_by_single_tokens(model)
        self.rows_N: Tensor
        self.written_N: Tensor
        self._columns_N: Tensor
        self._tokens_N: Tensor

    @property
    def can_feed_together(self) -> bool:
        """Whether one call of `feed` may have several sequences."""
        # Padding would enter the states of mixers.
        return self._mask_dtype is not None and not mixers_of(self._model)

    def _lengths_and_last(self, prompts: Ids) -> tuple[Tensor, Tensor]:
        pairs = [(len(ids), ids[-1]) for ids in prompts]
        lengths_P, last_P = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.to(self._device, non_blocking=True)
        return lengths_P, last_P

    def replace_prompts(self, numbers: Sequence[int], prompts: Ids) -> None:
        """Let rows continue these prompts in place of earlier ones."""
        numbers_n = torch.tensor(numbers).to(self._device, non_blocking=True)
        self._lengths_P[numbers_n], self._last_P[numbers_n] = self._lengths_and_last(prompts)
        if self._prompts_PL is not None:
            both = (self._prompts_PL, left_pad(prompts, self._device))
            width = max(x.shape[1] for x in both)
            # Padded with a token of the same prompt, as `left_pad` does.
            padded = [torch.cat([x[:, :1].expand(-1, width - x.shape[1]), x], dim=1) for x in both]
            self._prompts_PL, new_nL = padded
            self._prompts_PL[numbers_n] = new_nL

    def restart(self, rows: Sequence[int]) -> None:
        """Continue with these rows of the output, from their newest tokens, or their prompts' last."""
        self.rows_N = torch.tensor(rows).to(self._device, non_blocking=True)
        self.written_N = self._output.written(self.rows_N)
        prompts_N = self.rows_N // self._size
        newest_N = self._output.newest(self.rows_N, self.written_N)
        self._tokens_N = torch.where(self.written_N > 0, newest_N, self._last_P[prompts_N])
        self._columns_N = self._lengths_P[prompts_N] + self.written_N - 1

    def step(
        self, cache: SlotCache, num_columns: int, draws: UniformDraws, graphs: DecodeGraphs | None = None
    ) -> list[bool]:
        """Forward the newest tokens and add the next ones to the output; return which sequences are finished."""
        logits_NV = self.forward(cache, num_columns, graphs)
        uniforms_N, history_NL = draws.at(self.rows_N, self.written_N), self.history(num_columns)
        banned = self._output.banned(self.written_N)
        draw = TokenDraw(logits_NV, self._sampling, uniforms_N, history_NL, banned=banned)
        ended = self._output.add(self.rows_N, draw, len(self.rows_N))
        self._tokens_N = draw.tokens_N
        self.written_N, self._columns_N = self.written_N + 1, self._columns_N + 1
        return ended

    def forward(self, cache: SlotCache, num_columns: int, graphs: DecodeGraphs | None = None) -> Tensor:
        """Return the logits [N, V] of the newest tokens and add these to the cache."""
        step = partial(self._forward, cache)
        if graphs is not None and graphs.is_enabled:
            return graphs.run(step, cache, self._tokens_N, self._columns_N, num_columns)
        return step(self._tokens_N, self._columns_N, num_columns)

    def _forward(self, cache: SlotCache, tokens_N: Tensor, columns_N: Tensor, num_columns: int) -> Tensor:
        columns_N1, num_seen = columns_N[:, None], cache.begin(columns_N, num_columns)

        def mask(span: Span) -> Tensor:
            # A ring of n columns has the newest n tokens, or those of a chunk up to the newest.
            newest_N1 = columns_N1 - span.start(columns_N1) if span.is_chunk else columns_N1
            return self._mask(newest_N1, min(num_seen, span.size or num_seen))

        return call_with_cache(self._model, cache, tokens_N[:, None], masks_by_type(self._config, mask), columns_N1)

    def feed(self, cache: SlotCache, first_slot: int, ids: Ids, starts: Sequence[int]) -> None:
        """Add these tokens to slots side by side, from the columns `starts` on.

        Several sequences fit one forward, and the last has the most tokens (`split_feed`).
        """
        longest = max(start + len(each) for start, each in zip(starts, ids, strict=True))
        width = max(1, min(MAX_PREFILL, MAX_MASK // longest) // len(ids))
        num_fed = 0
        while num_fed < len(ids[-1]):
            has_state = num_fed + starts[0] > 0
            size = 1 if has_state and self._continues_by_single_tokens else width
            pieces = [each[num_fed : num_fed + size] for each in ids]
            self._feed_together(cache, first_slot, pieces, [num_fed + each for each in starts])
            num_fed += size

    def _feed_together(self, cache: SlotCache, first_slot: int, ids: Ids, starts: Sequence[int]) -> None:
        num_columns = cache.begin_feed(first_slot, starts, [len(each) for each in ids])
        longest = max(len(each) for each in ids)
        tokens_NT = torch.tensor([[*each, *[each[-1]] * (longest - len(each))] for each in ids])
        columns_NT = (torch.tensor(starts)[:, None] + torch.arange(longest)).clamp(max=num_columns - 1)
        columns_NT = columns_NT.to(self._device, non_blocking=True)

        def mask(span: Span) -> Tensor:
            if span.size is None or num_columns <= span.size:
                return self._mask(columns_NT, num_columns)
            # Column c of a ring has the newest token before the feed whose position is c modulo the ring's width.
            starts_N1 = torch.tensor(starts).to(self._device, non_blocking=True)[:, None]
            columns_L, new_T = (torch.arange(size, device=self._device) for size in (span.size, longest))
            held_NL = starts_N1 - 1 - (starts_N1 - 1 - columns_L) % len(columns_L)
            keys_N1L = torch.cat([held_NL, starts_N1 + new_T], dim=1)[:, None]
            first_NT1 = span.start(columns_NT)[..., None].clamp(min=0)
            return self._additive((keys_N1L >= first_NT1) & (keys_N1L <= columns_NT[..., None]))

        # Kernels without additive masks have one sequence, whose newest columns the tokens are.
        masks = None if self._mask_dtype is None else masks_by_type(self._config, mask)
        call_with_cache(self._model, cache, tokens_NT.to(self._device, non_blocking=True), masks, columns_NT)

    def history(self, num_columns: int) -> Tensor | None:
        """Return the tokens [N, L] for a repetition penalty, padded with the prompt's first; None without a penalty."""
        if self._prompts_PL is None:
            return None
        prompts_NL = self._prompts_PL[self.rows_N // self._size]
        written_NL = self._output.tokens(self.rows_N, num_columns)
        columns_L = torch.arange(written_NL.shape[1], device=self._device)
        written_NL = torch.where(columns_L < self.written_N[:, None], written_NL, prompts_NL[:, :1])
        return torch.cat([prompts_NL, written_NL], dim=-1)

    def _mask(self, columns_NT: Tensor, num_columns: int) -> Tensor:
        """Return which columns each token attends to.

        Additive scores [N, 1, T, L] if the attention adds masks, otherwise 0 and 1 [N, L] for the last tokens.
        """
        width = -(-num_columns // MASK_MULTIPLE) * MASK_MULTIPLE
        seen_NTL = torch.arange(width, device=self._device) <= columns_NT[..., None]
        if self._mask_dtype is None:
            return seen_NTL[:, -1, :num_columns].long()
        return self._additive(seen_NTL)[..., :num_columns]

    def _additive(self, seen_NTL: Tensor) -> Tensor:
        """Return scores [N, 1, T, L] to add: 0 for seen keys."""
        assert self._mask_dtype is not None
        zeros = torch.zeros((), dtype=self._mask_dtype, device=self._device)
        return torch.where(seen_NTL, zeros, torch.finfo(self._mask_dtype).min)[:, None]


def mask_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of an additive mask, None if transformers has to make the mask."""
    config = text_config(model)
    prepared = getattr(config, "_attn_implementation", None) in _ADDITIVE_MASKS and not getattr(config, "alibi", False)
    return parameter_dtype(model) if prepared else None
