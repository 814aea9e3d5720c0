"""Decode loop of turns: conversations request them while others are under way, and keep their slots while their tools run.

Slots [0, R) run, slots [R, R + K) are kept for conversations between two turns, the others are free: a forward computes the running
ones alone. Admission brings a request to the state "all tokens but the last are in the cache": it continues in its conversation's
kept slot, or copies the slot with the longest common prefix, and forwards the rest. The decode step forwards the last token. So
prompts, continuations, branches, and tries after a slot was lost are one path, and each token is forwarded once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import nn
from transformers.cache_utils import Cache

from lowpeak.arguments import Sampling
from lowpeak.errors import EngineError, first_line
from lowpeak.memory import is_out_of_memory
from lowpeak.rollout.native.cache import MAX_PREFILL, SlotCache, bytes_per_token, prefill_prompts, split_prefill
from lowpeak.rollout.native.decode_loop import DecodeInputs
from lowpeak.rollout.native.output import OutputBuffer
from lowpeak.rollout.native.scheduler import check_capacity
from lowpeak.rollout.sampling import UniformDraws
from lowpeak.rollout.turns import Key, SampledTurn, TurnQueue, TurnRequest

logger = logging.getLogger(__name__)

_LEAST_SHARED = 8  # tokens: for a shorter common prefix no slot is copied
_MAX_MASK = 1 << 24  # elements of the mask of one feed
_MAX_RATIO = 1.5  # between the numbers of tokens that are fed together, since the shorter ones are padded


def request_width(request: TurnRequest) -> int:
    """Return the columns of a slot that the request may need."""
    return len(request.ids) + request.max_tokens


class RequestSchedule:
    """The requests that wait for a slot, and the conversations under way.

    With a `lag` a conversation's next request starts exactly so many steps after its turn has ended, and the first ones start
    together: which sequences share a forward then depends on no tool's speed. `poll` takes the place of waiting in the queue.
    """

    def __init__(self, queue: TurnQueue, lag: int | None, poll: Callable[[], None] | None) -> None:
        self._queue, self._lag, self._poll = queue, lag, poll
        self.step = 0
        self.waiting: list[TurnRequest] = []
        self.widths: dict[Key, int] = {}  # the most columns of each conversation that has begun and not ended
        self._first_starts: dict[Key, int] = {}
        self._due: dict[Key, int] = {}  # with a lag: the step at which a conversation goes on, or has ended
        self._ended: dict[Key, None] = {}
        self._begun: set[Key] = set()
        self._cancelled: set[TurnRequest] = set()
        self._has_news = self._is_closed = False

    @property
    def num_conversations(self) -> int:
        return max(len(self.widths), self._queue.num_conversations)

    def collect(self, is_running: bool) -> bool:
        """Take what has arrived, and wait while nothing can be done without more; return whether the rollout goes on."""
        self._take(wait=False)
        while not self._is_closed and (self._lacks_due() or not (is_running or self.ready() or self._skip_steps())):
            if self._poll is not None:
                self._poll()
            self._take(wait=self._poll is None)
        return not self._is_closed

    def _take(self, wait: bool) -> None:
        arrivals = self._queue.take(wait)
        for request in arrivals.requests:
            conversation = request.conversation
            self.widths[conversation] = max(request_width(request), self.widths.get(conversation, 0))
            self._begun.add(conversation)
        self.waiting += arrivals.requests
        self._cancelled.update(arrivals.cancelled)
        self._ended |= dict.fromkeys(arrivals.ended)
        self._begun.update(arrivals.ended)
        self._has_news, self._is_closed = self._has_news or any(arrivals), arrivals.is_closed

    def _lacks_due(self) -> bool:
        """Return whether a request that is due has not arrived."""
        if self._lag is None:
            return False
        here = {request.conversation for request in self.waiting} | self._ended.keys()
        is_late = any(step <= self.step and key not in here for key, step in self._due.items())
        return is_late or len(self._begun) < self._queue.num_conversations

    def _skip_steps(self) -> bool:
        """Go to the next step at which a conversation goes on, if nothing runs until then; return whether there is one."""
        if self._due:
            self.step = max(self.step, min(self._due.values()))
        return bool(self._due) and not self._lacks_due()

    def ready(self) -> list[TurnRequest]:
        """Return the requests that may start: the oldest conversations first, of new ones the longest."""
        ready = [request for request in self.waiting if self._due.get(request.conversation, 0) <= self.step]
        new = len(self._first_starts)

        def order(request: TurnRequest) -> tuple[int, int, Key]:
            key = request.conversation
            return self._first_starts.get(key, new), -self.widths[key], key

        return sorted(ready, key=order)

    def start(self, requests: Sequence[TurnRequest]) -> None:
        self.waiting = [request for request in self.waiting if request not in requests]
        for request in requests:
            self._first_starts.setdefault(request.conversation, len(self._first_starts))
            self._due.pop(request.conversation, None)

    def restart(self, requests: Sequence[TurnRequest]) -> None:
        """Let requests that have started wait again."""
        self.waiting += requests
        self._has_news = True

    def end_turn(self, conversation: Key) -> None:
        self._has_news = True
        if self._lag is not None:
            self._due[conversation] = self.step + self._lag

    def pop_news(self) -> bool:
        """Return whether requests wait that could not start before."""
        has_news, self._has_news = self._has_news or self._lag is not None, False
        return has_news and bool(self.waiting)

    def pop_cancelled(self) -> set[TurnRequest]:
        cancelled, self._cancelled = self._cancelled, set()
        return cancelled

    def pop_ended(self) -> list[Key]:
        """Return the conversations that have ended; with a lag not before the step at which they are expected."""
        ended = [key for key in self._ended if self._due.get(key, 0) <= self.step]
        for key in ended:
            for known in (self._ended, self._due, self.widths, self._first_starts):
                known.pop(key, None)
        return ended


@dataclass(eq=False)
class CachedSequence:
    """The tokens of one slot: the first `num_cached` of `ids` have keys and values.

    `slot` is their place, None if there are none; `row` is the place of the turn in the output.
    """

    request: TurnRequest
    ids: list[int]
    num_cached: int
    slot: int | None
    row: int = -1
    kept_since: int = 0

    @property
    def conversation(self) -> Key:
        return self.request.conversation

    @property
    def num_missing(self) -> int:
        """The tokens to forward before the decode step forwards the last one."""
        return len(self.ids) - 1 - self.num_cached


class SlotTable:
    """The sequences in the slots: running ones in the first, kept ones in the next."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.running: list[CachedSequence] = []
        self.kept: list[CachedSequence] = []
        self.is_arranged = True
        self._num_kept = 0  # ever

    @property
    def num_held(self) -> int:
        return len(self.running) + len(self.kept)

    def admit(self, requests: Sequence[TurnRequest]) -> list[CachedSequence]:
        """Return the sequences of those requests that have room now; they run from the next `arrange` on."""
        started: list[CachedSequence] = []
        going_on = {each.conversation for each in self.kept}
        for request in requests:
            if not self._has_room(request.conversation in going_on):
                continue
            ids = list(request.ids)
            source, shared = self._match(request.conversation, ids)
            # A member of a group copies the prompt once another member's is in the cache.
            if all(common_prefix(each.ids[:-1], ids[:-1]) < shared + _LEAST_SHARED for each in started):
                started.append(self._enter(request, ids, source, shared))
        return started

    def _has_room(self, goes_on: bool) -> bool:
        """A kept sequence gives its slot up only while fewer than half of the slots run, since it is forwarded again later."""
        is_full = self.num_held >= self.num_slots
        may_evict = goes_on or 2 * len(self.running) < self.num_slots
        return len(self.running) < self.num_slots and (not is_full or may_evict)

    def _match(self, conversation: Key, ids: list[int]) -> tuple[CachedSequence | None, int]:
        """Return the sequence whose cache begins with the most of these tokens but the last, and how many."""
        own = [each for each in self.kept if each.conversation == conversation]
        others = [each for each in (*self.kept, *self.running) if each not in own]
        best, most = None, 0
        for each in (*own, *others):
            shared = common_prefix(each.ids[: each.num_cached], ids[:-1])
            if each in own and shared == each.num_cached:
                return each, shared
            if shared > most:
                best, most = each, shared
        return best, most

    def _enter(
        self, request: TurnRequest, ids: list[int], source: CachedSequence | None, shared: int
    ) -> CachedSequence:
        key = request.conversation
        goes_on = source in self.kept and source.conversation == key and shared == source.num_cached
        if not goes_on and shared < _LEAST_SHARED:
            source, shared = None, 0
        if goes_on:
            self.kept.remove(source)
        elif self.num_held >= self.num_slots:
            # A branch takes a slot of its own conversation, in which its first tokens may be.
            self.kept.remove(min(self.kept, key=lambda each: (each.conversation != key, each.kept_since)))
        sequence = CachedSequence(request, ids, shared, None if source is None else source.slot)
        self.running.append(sequence)
        self.is_arranged = False
        return sequence

    def keep(self, sequences: Sequence[CachedSequence]) -> None:
        """Let these running sequences wait for their next requests in their slots."""
        for each in sequences:
            self._num_kept += 1
            each.kept_since = self._num_kept
            self.running.remove(each)
        self.kept += sequences
        self.is_arranged = False

    def resize(self, num_slots: int) -> None:
        """Have so many slots, at least as many as run."""
        newest = sorted(self.kept, key=lambda each: -each.kept_since)
        self.kept, self.num_slots, self.is_arranged = newest[: num_slots - len(self.running)], num_slots, False

    def arrange(self) -> tuple[dict[int, int], list[CachedSequence], list[CachedSequence]]:
        """Give running sequences the first slots, and kept ones the next.

        Returns the source of each slot with other contents than before, all to be read before any is written; the sequences
        without cached tokens; and those that lack some, in slots side by side, the fewest tokens first.
        """
        fresh = [each for each in self.running if each.slot is None]
        lacking = [each for each in self.running if each.slot is not None and each.num_missing > 0]
        fed = sorted(lacking, key=lambda each: each.num_missing)
        sources: dict[int, int] = {}
        start = 0
        groups = ([each for each in self.running if each not in fed], fed, self.kept)
        for group in groups:
            places = range(start, start + len(group))
            start = places.stop
            stays = {each.slot: each for each in group if each.slot in places}
            others = iter([each for each in group if stays.get(each.slot) is not each])
            group[:] = [stays[place] if place in stays else next(others) for place in places]
            sources |= {place: each.slot for place, each in zip(places, group, strict=True) if each.slot is not None}
        self.running = groups[0] + fed
        for place, each in enumerate((*self.running, *self.kept)):
            each.slot = place
        self.is_arranged = True
        return {place: slot for place, slot in sources.items() if place != slot}, fresh, fed


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    # Slices are compared in C, so a bisection is faster than a scan.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low


@dataclass(eq=False, repr=False)
class TurnLoop:
    """Sampling of the turns that conversations request, in the slots of a cache that never exceeds the budget.

    `new_output` returns an output buffer of so many rows. If memory runs out, the turns under way start again in a cache of
    half the size, with the same random numbers.
    """

    model: nn.Module
    requests: RequestSchedule
    kv_cache_bytes: int
    sampling: Sampling
    new_output: Callable[[int], OutputBuffer]
    on_tokens: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        self._table = SlotTable()
        self._cache = SlotCache(0)
        self._max_tokens = 0
        self._one_token: Cache | None = None
        self._num_forwarded: dict[Key, int] = {}  # tokens of a conversation that have been in the cache
        self._output: OutputBuffer
        self._draws: UniformDraws
        self._inputs: DecodeInputs
        self._num_rows, self._free_rows = 0, list[int]()

    def run(self) -> None:
        """Answer requests until the queue is closed."""
        while self.requests.collect(bool(self._table.running)):
            self._drop()
            try:
                self._admit()
                if self._table.running:
                    self._step()
                continue
            except (MemoryError, RuntimeError) as error:
                least = max(self.requests.widths.values(), default=0)
                if not is_out_of_memory(error) or self._cache.max_tokens // 2 < least:
                    raise
                reason = first_line(error)
            # Outside of the handler: the error's frames hold tensors.
            self._max_tokens = self._cache.max_tokens // 2
            logger.warning(
                "Out of memory while sampling turns: they start again in a KV cache of %d tokens. (%s)",
                *(self._max_tokens, reason),
            )
            self._drop_cache()

    def _drop(self) -> None:
        """Drop the requests that nobody waits for, and the slots of conversations that have ended."""
        ended, cancelled = self.requests.pop_ended(), self.requests.pop_cancelled()
        running = [each for each in self._table.running if each.request in cancelled or each.conversation in ended]
        waiting = [each for each in self.requests.waiting if each in cancelled or each.conversation in ended]
        for request in [*waiting, *(each.request for each in running)]:
            request.answer.set_exception(CancelledError())
        self.requests.waiting = [each for each in self.requests.waiting if each not in waiting]
        for each in running:
            # Another try finds its prompt.
            each.num_cached = min(each.num_cached, len(each.ids))
        self._keep(running)
        self._table.kept = [each for each in self._table.kept if each.conversation not in ended]

    def _keep(self, sequences: Sequence[CachedSequence]) -> None:
        if sequences:
            self._free_rows += [each.row for each in sequences]
            self._table.keep(sequences)

    def _admit(self) -> None:
        """Start the requests that have room, and bring all of their tokens but the last into the cache."""
        has_room, has_changed = self.requests.pop_news() and self._fit_slots(), False
        while (has_room and self._start()) or not self._table.is_arranged:
            has_changed = True
            fresh, fed = self._arrange()
            self._prefill(fresh)
            self._feed(fed)
        if has_changed and self._table.running:
            self._inputs.restart([each.row for each in self._table.running])

    def _fit_slots(self) -> bool:
        """Divide the cache for the conversations under way; return whether it has room for those that run."""
        widths, table = self.requests.widths, self._table
        if self._one_token is None:
            ids = [self.requests.waiting[0].ids[:1]]
            self._one_token = prefill_prompts(self.model, ids, self.new_output(0).device)[1]
            # Under autocast the cache is narrower than the parameters.
            dtype = self._one_token.layers[0].values.dtype
            self._max_tokens = self.kv_cache_bytes // bytes_per_token(self.model, dtype)
        columns, longest = max(widths.values()), max(self.requests.waiting, key=request_width)
        most = min(self.requests.num_conversations, self._max_tokens // columns)
        check_capacity(most, len(longest.ids), longest.max_tokens, self._max_tokens)
        num_slots = self._cache.max_tokens // columns
        if 2 * num_slots <= most:
            self._drop_cache()
            self._make_cache(most, columns)
        elif columns > self._cache.num_columns or self._cache.num_slots < min(num_slots, len(widths)):
            num_slots = min(num_slots, self._num_rows)
            if len(table.running) > num_slots:
                return False
            table.resize(num_slots)
            self._arrange()
            self._cache.reserve(num_slots, columns, table.num_held)
        return True

    def _drop_cache(self) -> None:
        """Let the running turns start again, and free the cache."""
        self.requests.restart([each.request for each in self._table.running])
        self._table, self._cache = SlotTable(), SlotCache(0)

    def _make_cache(self, num_slots: int, num_columns: int) -> None:
        assert self._one_token is not None, "the first request has made it"
        self._table.num_slots = num_slots
        self._cache = SlotCache(self._max_tokens)
        self._cache.reserve(num_slots, num_columns, 0)
        self._cache.allocate(self._one_token)
        num_rows, sampling = self.requests.num_conversations, replace(self.sampling, num_generations=1)
        self._num_rows, self._free_rows = num_rows, list(range(num_rows))
        self._output = self.new_output(num_rows)
        self._draws = UniformDraws(num_rows, sampling, self._output.device)
        self._inputs = DecodeInputs(self.model, [[0]] * num_rows, sampling, self._output)

    def _start(self) -> bool:
        """Give the requests that have room their rows and slots; return whether there are any."""
        started = self._table.admit(self.requests.ready())
        if started:
            requests = [each.request for each in started]
            self.requests.start(requests)
            rows = [self._free_rows.pop() for _ in started]
            for each, each.row in zip(started, rows, strict=True):
                pass
            self._output.begin(rows, [request.max_tokens for request in requests])
            self._draws.make(rows, [request.key for request in requests])
            self._inputs.replace_prompts(rows, [each.ids for each in started])
        return bool(started)

    def _arrange(self) -> tuple[list[CachedSequence], list[CachedSequence]]:
        """Move sequences to their slots; return those without cached tokens, and those that lack some."""
        sources, fresh, fed = self._table.arrange()
        held = [*self._table.running, *self._table.kept]
        num_columns = max((held[place].num_cached for place in sources), default=0)
        self._cache.move(list(sources), list(sources.values()), num_columns)
        return fresh, fed

    def _prefill(self, sequences: Sequence[CachedSequence]) -> None:
        """Forward all tokens but the last of sequences that have none in the cache."""
        longer = [each for each in sequences if each.num_missing]
        for part in split_prefill(range(len(longer)), [each.num_missing for each in longer]):
            ids = [longer[i].ids[:-1] for i in part]
            lengths = [len(each) for each in ids]
            _, prefilled = prefill_prompts(self.model, ids, self._output.device)
            slots = sorted((longer[i].slot, prompt) for prompt, i in enumerate(part))
            for _, run in groupby(enumerate(slots), key=lambda pair: pair[1][0] - pair[0]):
                side_by_side = [pair for _, pair in run]
                prompts = [prompt for _, prompt in side_by_side]
                self._cache.place(prefilled, prompts, lengths, side_by_side[0][0])
            self._note_forwarded([longer[i] for i in part])

    def _feed(self, sequences: Sequence[CachedSequence]) -> None:
        """Forward the tokens that the cache lacks, but the last, of sequences in slots side by side."""
        for part in split_feed(sequences, self._inputs.can_feed_together):
            missing, starts = [each.ids[each.num_cached : -1] for each in part], [each.num_cached for each in part]
            most = min(MAX_PREFILL, _MAX_MASK // max(len(each.ids) for each in part))
            # Only one sequence by itself can have more tokens than one forward.
            width = max(1, most // len(part))
            for start in range(0, len(missing[-1]), width):
                pieces = [ids[start : start + width] for ids in missing]
                self._inputs.feed(self._cache, part[0].slot, pieces, [start + each for each in starts])
            self._note_forwarded(part)

    def _note_forwarded(self, sequences: Sequence[CachedSequence]) -> None:
        """Count as computed what was padded, or forwarded before; other tokens of prompts and replies are not counted."""
        num_new, longest = 0, max(each.num_missing for each in sequences)
        for each in sequences:
            before = max(each.num_cached, self._num_forwarded.get(each.conversation, 0))
            each.num_cached = len(each.ids) - 1
            num_new += max(0, each.num_cached - before)
            self._num_forwarded[each.conversation] = max(each.num_cached, before)
        if self.on_tokens is not None:
            self.on_tokens(0, longest * len(sequences) - num_new)

    def _step(self) -> None:
        running = self._table.running
        num_columns = max(each.num_cached for each in running) + 1
        ended = self._inputs.step(self._cache, num_columns, self._draws)
        self.requests.step += 1
        for each in running:
            each.num_cached += 1
        self._answer([each for each, has_ended in zip(running, ended, strict=True) if has_ended])

    def _answer(self, sequences: Sequence[CachedSequence]) -> None:
        """Answer the requests of ended turns, and keep their slots."""
        if not sequences:
            return
        for each, turn in zip(sequences, self._output.completions([each.row for each in sequences]), strict=True):
            ids = turn.ids.tolist()
            each.ids = [*each.ids, *ids]
            self._num_forwarded[each.conversation] = each.num_cached
            self.requests.end_turn(each.conversation)
            each.request.answer.set_result(SampledTurn(ids, turn.logprobs.tolist(), turn.finish_reason))
        self._keep(sequences)


def split_feed(sequences: Sequence[CachedSequence], together: bool) -> Iterator[list[CachedSequence]]:
    """Yield the sequences of each forward, in order: those that lack about as many tokens, within bounds of tokens and mask."""
    part: list[CachedSequence] = []
    for each in sequences:
        num_tokens = each.num_missing * (len(part) + 1)
        num_columns = max(len(other.ids) for other in (*part, each))
        fits = num_tokens <= MAX_PREFILL and num_tokens * num_columns <= _MAX_MASK
        if part and not (together and fits and each.num_missing <= _MAX_RATIO * part[0].num_missing):
            yield part
            part = []
        part.append(each)
    if part:
        yield part
