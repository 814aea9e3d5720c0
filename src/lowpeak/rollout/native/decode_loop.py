"""The rows that generate together, each at its own position, and what the model is fed for each.

A group begins with one prefill of its prompt, after which the first tokens of all its completions are drawn at once.
Its rows then take slots as there are free ones; one that finds no slot yet copies the prompt's keys and values later,
from a row of its group. The rows that run are always the first slots, so that no forward computes any other.
Shapes: P prompts, N rows that run, L columns of the cache with the newest token, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowpeak.arguments import Sampling
from lowpeak.attention import NAME
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache import SlotCache, bytes_per_token, parameter_dtype, text_config
from lowpeak.rollout.native.output import OutputBuffer
from lowpeak.rollout.native.prefill import left_pad, prefill_prompts, split_prefill
from lowpeak.rollout.native.scheduler import PromptQueue, SequenceId
from lowpeak.rollout.sampling import UniformDraws, sample_tokens

# Attention that adds a mask to its scores takes one that is made already, once for all layers; flash kernels do not.
_ADD_MASKS = ("sdpa", "eager", NAME)


class RunningSequence(NamedTuple):
    """A row in a slot: its number, its prompt, and the column of its newest token less the steps of the batch so far."""

    number: int
    prompt: int
    offset: int


@dataclass(eq=False, repr=False)
class DecodeLoop:
    """Rows in the slots of a cache that never holds more than the budget's tokens."""

    model: nn.Module
    waiting: PromptQueue
    kv_cache_bytes: int
    prompts: Sequence[Prompt]
    sampling: Sampling
    progress: OutputBuffer

    def __post_init__(self) -> None:
        self._rows: list[RunningSequence] = []
        self._begun: deque[tuple[int, int]] = deque()  # numbers and prompts of rows that have begun and have no slot
        self._over: list[bool] = []
        self._num_steps = 0
        longest = max(self.waiting.lengths, default=0)
        self._cache = SlotCache(self.waiting.max_tokens, longest + self.sampling.max_new_tokens)
        num_rows = len(self.prompts) * self.sampling.num_generations
        self._draws = UniformDraws(num_rows, self.sampling, self.progress.device)
        self._feed = DecodeInputs(self.model, [prompt.ids for prompt in self.prompts], self.sampling, self.progress)

    def run(self) -> None:
        """Generate all waiting rows into `progress`, whose row of completion c of prompt p is `p x generations + c`.

        One small read per token, of which rows have ended, is all that waits for the device.
        """
        while self._fill():
            self._step()

    def _fill(self) -> bool:
        """Drop rows that have ended and let others enter; whether any row runs now."""
        changed = any(self._over)
        if changed:
            self._arrange()
        # One group at most has rows without a slot, so that one of its rows has the prompt in a slot all the time.
        while not self._begun and (prompts := self.waiting.take(self._num_slots() - len(self._rows))):
            changed = True
            for part in split_prefill(prompts, self.waiting.lengths):
                self._begin(part)
        if changed and self._rows:
            self._feed.restart([row.number for row in self._rows])
        return bool(self._rows)

    def _step(self) -> None:
        num_columns = self._num_columns()
        self._cache.reserve(self._cache.num_slots, num_columns, len(self._rows))
        logits_NV = self._feed.forward(self._cache, num_columns)
        uniforms_N = self._draws.at(self._feed.rows_N, self._feed.written_N)
        history_NL = self._feed.history(num_columns)
        chosen = sample_tokens(logits_NV, self.sampling, uniforms_N, history_NL)
        self._over = self.progress.add(self._feed.rows_N, *chosen, len(self._rows))
        self._feed.advance(chosen[0])
        self._num_steps += 1

    def _num_columns(self) -> int:
        """Columns that the rows take with their newest token."""
        return self._num_steps + max(row.offset for row in self._rows) + 1

    def _num_slots(self, entering: Sequence[int] = ()) -> int:
        """Slots that the budget holds with rows of the prompts that have begun and those that are `entering`."""
        begun = [row.prompt for row in self._rows] + [prompt for _, prompt in self._begun]
        return self.waiting.num_slots([*begun, *entering])

    def _arrange(self) -> None:
        """Rows that have begun take the slots of those that have ended; the last rows move into what is left."""
        num_held = len(self._rows)
        holder = {row.prompt: slot for slot, row in enumerate(self._rows)}
        free = deque(slot for slot, over in enumerate(self._over) if over)
        rows = {slot: row for slot, row in enumerate(self._rows) if not self._over[slot]}
        self._rows, self._over = list(rows.values()), []
        num_slots = self._num_slots()
        sources: dict[int, int] = {}  # of each slot that is written
        while self._begun and len(rows) < num_slots:
            number, prompt = self._begun.popleft()
            slot = free.popleft() if free else len(rows)
            rows[slot], sources[slot] = self._entering(number, prompt), holder[prompt]
        sources |= _close_gaps(rows, free)
        self._rows = [rows[slot] for slot in range(len(rows))]
        if sources:
            self._reserve(num_slots, num_held)
            self._cache.move(list(sources), list(sources.values()), self._num_columns())

    def _begin(self, prompts: Sequence[int]) -> None:
        """Prefill prompts, draw the first tokens of their groups, and give slots to as many rows as there are."""
        logits_PV, prefilled = prefill_prompts(self.model, [self.prompts[i].ids for i in prompts], self.progress.device)
        if not self._cache.layers:
            self._count(prefilled.layers[0].values.dtype)
        going = self._first_tokens(prompts, logits_PV)
        num_held, num_slots = len(self._rows), self._num_slots(prompts)
        taken = going[: num_slots - num_held]
        self._rows += [self._entering(number, prompt) for number, prompt in taken]
        self._begun.extend(going[len(taken) :])
        if taken:
            self._reserve(num_slots, num_held)
            place = {prompt: i for i, prompt in enumerate(prompts)}
            places = [place[prompt] for _, prompt in taken]
            self._cache.place(prefilled, places, [len(self.prompts[i].ids) for i in prompts], num_held)

    def _count(self, dtype: torch.dtype) -> None:
        """Count the budget in tokens as the cache will store them: under autocast in fewer bytes than parameters."""
        max_tokens = self.kv_cache_bytes // bytes_per_token(self.model, dtype)
        self.waiting.set_budget(max_tokens)
        self._cache.max_tokens = max_tokens

    def _first_tokens(self, prompts: Sequence[int], logits_PV: Tensor) -> list[tuple[int, int]]:
        """Choose the first token of each row of these groups; numbers and prompts of those that go on."""
        size = self.sampling.num_generations
        wave = [SequenceId(prompt, completion) for prompt in prompts for completion in range(size)]
        numbers = [row.prompt * size + row.completion for row in wave]
        self._draws.make(numbers, wave, self.prompts)
        self._feed.restart(numbers)
        rows_N, written_N = self._feed.rows_N, self._feed.written_N
        sources_N = torch.arange(len(prompts), device=rows_N.device).repeat_interleave(size)
        uniforms_N = self._draws.at(rows_N, written_N)
        chosen = sample_tokens(logits_PV, self.sampling, uniforms_N, self._feed.history(0), sources_N)
        over = self.progress.add(rows_N, *chosen, len(numbers))
        return [(n, row.prompt) for n, row, ended in zip(numbers, wave, over, strict=True) if not ended]

    def _entering(self, number: int, prompt: int) -> RunningSequence:
        return RunningSequence(number, prompt, len(self.prompts[prompt].ids) - self._num_steps)

    def _reserve(self, num_slots: int, num_held: int) -> None:
        """Room for as many rows as may ever run, and for the newest tokens of those that run now."""
        most = len(self._rows) + len(self._begun) + self.waiting.num_rows
        self._cache.reserve(min(num_slots, most), self._num_columns(), num_held)


def _close_gaps(rows: dict[int, RunningSequence], free: Iterable[int]) -> dict[int, int]:
    """Move the last rows into slots that are free before them; of each slot that is written, where its row was."""
    sources: dict[int, int] = {}
    for slot in free:
        last = max(rows, default=-1)
        if slot < last:
            rows[slot], sources[slot] = rows.pop(last), last
    return sources


class DecodeInputs:
    """The newest token of each row of a batch, on the device; a token's column in the cache is its position."""

    def __init__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling, progress: OutputBuffer
    ) -> None:
        self._model = model
        self._size = sampling.num_generations
        self._progress = progress
        self._device = progress.device
        self._lengths_P = torch.tensor([len(ids) for ids in prompts], dtype=torch.int64).to(self._device)
        known = sampling.repetition_penalty != 1 and len(prompts) > 0
        self._prompts_PL = left_pad(prompts, self._device) if known else None
        self._mask_dtype = _mask_dtype(model)
        self.rows_N: Tensor
        self.written_N: Tensor
        self._columns_N: Tensor
        self._tokens_N: Tensor

    def restart(self, rows: Sequence[int]) -> None:
        """Go on with these rows, numbers of the call's, from what they have written."""
        self.rows_N = torch.tensor(rows).to(self._device, non_blocking=True)
        self.written_N = self._progress.written(self.rows_N)
        self._tokens_N = self._progress.newest(self.rows_N, self.written_N)
        self._columns_N = self._lengths_P[self.rows_N // self._size] + self.written_N - 1

    def advance(self, tokens_N: Tensor) -> None:
        self._tokens_N = tokens_N
        self.written_N, self._columns_N = self.written_N + 1, self._columns_N + 1

    def forward(self, cache: SlotCache, num_columns: int) -> Tensor:
        """The logits [N, V] of the rows' newest tokens, which go into the cache."""
        cache.begin(self._columns_N, num_columns)
        output = self._model(
            input_ids=self._tokens_N[:, None],
            attention_mask=self._mask(num_columns),
            position_ids=self._columns_N[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def history(self, num_columns: int) -> Tensor | None:
        """The tokens [N, L] that a repetition penalty knows, padded with the prompt's first; None where there is none."""
        if self._prompts_PL is None:
            return None
        prompts_NL = self._prompts_PL[self.rows_N // self._size]
        written_NL = self._progress.tokens(self.rows_N, num_columns)
        columns_L = torch.arange(written_NL.shape[1], device=self._device)
        written_NL = torch.where(columns_L < self.written_N[:, None], written_NL, prompts_NL[:, :1])
        return torch.cat([prompts_NL, written_NL], dim=-1)

    def _mask(self, num_columns: int) -> Tensor:
        """What each row sees of the columns: scores to add [N, 1, 1, L] where attention adds them, else 0 and 1 [N, L]."""
        seen_NL = torch.arange(num_columns, device=self._device) <= self._columns_N[:, None]
        if self._mask_dtype is None:
            return seen_NL.long()
        zeros = torch.zeros((), dtype=self._mask_dtype, device=self._device)
        return torch.where(seen_NL, zeros, torch.finfo(self._mask_dtype).min)[:, None, None]


def _mask_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of a mask that is added to the scores, None where transformers is to make the mask."""
    config = text_config(model)
    prepared = getattr(config, "_attn_implementation", None) in _ADD_MASKS and not getattr(config, "alibi", False)
    return parameter_dtype(model) if prepared else None
