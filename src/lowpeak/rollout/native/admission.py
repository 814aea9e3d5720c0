"""Decode loop of turns: conversations request them while others are under way, and keep their slots while their tools run.

Slots [0, R) run, slots [R, R + K) are kept for conversations between two turns, the others are free: a forward computes the running
ones alone. Admission brings a request to the state "all tokens but the last are in the cache": it continues in its conversation's
kept slot, or copies the slot with the longest common prefix, and feeds the rest. The decode step forwards the last token. So
prompts, continuations, branches and turns that lost their slot are one path, and each token is forwarded once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers.cache_utils import Cache

from lowpeak.arguments import Sampling
from lowpeak.data import common_prefix_length
from lowpeak.errors import first_line
from lowpeak.memory import is_out_of_memory
from lowpeak.rollout.native.cache import MAX_PREFILL, SlotCache, prefill_prompts
from lowpeak.rollout.native.cache_bytes import sequence_bytes
from lowpeak.rollout.native.cache_layers import storing_layers
from lowpeak.rollout.native.decode_loop import MAX_MASK, DecodeInputs
from lowpeak.rollout.native.output import OutputBuffer
from lowpeak.rollout.native.scheduler import check_capacity
from lowpeak.rollout.turns import Key, SampledTurn, TurnQueue, TurnRequest
from lowpeak.rollout.uniforms import UniformDraws

logger = logging.getLogger(__name__)

_LEAST_SHARED = 8  # tokens: for a shorter common prefix no slot is copied
_MAX_RATIO = 1.5  # between the numbers of tokens that are fed together, since the fewer ones are padded


class RequestSchedule:
    """The requests that wait for a slot, and the conversations under way.

    With a `lag` a conversation's next request starts exactly so many steps after its turn has ended: which sequences share a
    forward then depends on no tool's speed. `poll` takes the place of waiting in the queue.
    """

    def __init__(self, queue: TurnQueue, lag: int | None, poll: Callable[[], None] | None) -> None:
        self.queue, self._lag, self._poll = queue, lag, poll
        self.step = 0
        self.waiting: list[TurnRequest] = []
        self.widths: dict[Key, int] = {}  # the most columns of each conversation that has begun and not ended
        self._num_begun = 0
        self._started: set[Key] = set()
        self._due: dict[Key, int] = {}  # with a lag: the step at which a conversation goes on, or has ended
        self._ended: set[Key] = set()

    @property
    def num_conversations(self) -> int:
        return max(len(self.widths), self.queue.num_conversations)

    def collect(self, is_running: bool) -> bool:
        """Take new requests and endings, waiting while nothing else can be done; return whether the rollout goes on."""
        is_closed = self._take(wait=False)
        while not is_closed and (self._lacks_due() or not (is_running or self.ready() or self._skip_steps())):
            if self._poll is not None:
                self._poll()
            is_closed = self._take(wait=self._poll is None)
        return not is_closed

    def _take(self, wait: bool) -> bool:
        requests, ended, is_closed = self.queue.take(wait)
        for request in requests:
            key, width = request.conversation, len(request.ids) + request.max_tokens
            self._num_begun += key not in self.widths
            self.widths[key] = max(width, self.widths.get(key, 0))
        self._num_begun += len(set(ended) - self.widths.keys())
        self._ended.update(ended)
        self.waiting = [request for request in (*self.waiting, *requests) if not request.is_cancelled]
        return is_closed

    def _lacks_due(self) -> bool:
        """Return whether a request that is due has not arrived: a first one, or with a lag a later one."""
        arrived = {request.conversation for request in self.waiting} | self._ended
        is_late = any(step <= self.step and key not in arrived for key, step in self._due.items())
        return is_late or self._num_begun < self.queue.num_conversations

    def _skip_steps(self) -> bool:
        """Go to the next step at which a conversation goes on, if nothing runs until then; return whether there is one."""
        self.step = max(self.step, min(self._due.values(), default=0))
        return bool(self._due) and not self._lacks_due()

    def ready(self) -> list[TurnRequest]:
        """Return the requests that may start: those of conversations under way first, and the longest conversations first."""
        ready = [request for request in self.waiting if self._due.get(request.conversation, 0) <= self.step]
        precedence = {key: (key not in self._started, -width, key) for key, width in self.widths.items()}
        return sorted(ready, key=lambda request: precedence[request.conversation])

    def start(self, requests: Sequence[TurnRequest]) -> None:
        self.waiting = [request for request in self.waiting if request not in requests]
        for request in requests:
            self._started.add(request.conversation)
            self._due.pop(request.conversation, None)

    def end_turn(self, conversation: Key) -> None:
        if self._lag is not None:
            self._due[conversation] = self.step + self._lag

    def pop_ended(self) -> set[Key]:
        """Return the conversations that have ended; with a lag not before the step at which they are expected."""
        ended = {key for key in self._ended if self._due.get(key, 0) <= self.step}
        for key in ended:
            self._due.pop(key, None)
            self.widths.pop(key, None)
        self._ended -= ended
        return ended


@dataclass(eq=False)
class CachedSequence:
    """The tokens of one slot: the first `num_cached` of `ids` have keys and values."""

    request: TurnRequest
    ids: list[int]
    num_cached: int
    slot: int | None  # None: no token is cached
    row: int  # in the output
    num_held: int = 0  # the tokens of the slot that this one began as a part of

    @property
    def num_missing(self) -> int:
        """The tokens to feed before the decode step forwards the last one."""
        return len(self.ids) - 1 - self.num_cached


class SlotTable:
    """The sequences in the slots: running ones in the first, kept ones in the next; `kept` begins with the oldest."""

    def __init__(
        self, num_slots: int, num_rows: int, can_shorten: Callable[[int, int], bool] = lambda cached, kept: True
    ) -> None:
        self.num_slots, self._can_shorten = num_slots, can_shorten
        self.running: list[CachedSequence] = []
        self.kept: list[CachedSequence] = []
        self.is_arranged = True
        self._free_rows = list(range(num_rows))

    def admit(self, requests: Sequence[TurnRequest]) -> list[CachedSequence]:
        """Return the sequences of those requests that have room now; they run from the next `arrange` on."""
        started: list[CachedSequence] = []
        for request in requests:
            own = [each for each in self.kept if each.request.conversation == request.conversation]
            if self._has_room(bool(own)):
                source, shared = self._match(ids := list(request.ids), own)
                # A member of a group copies the prompt once another's is in the cache.
                if not any(_share(each.ids[:-1], ids[:-1], shared + _LEAST_SHARED) for each in started):
                    self._make_room(own, source, shared)
                    slot, held = (None, 0) if source is None else (source.slot, max(source.num_cached, source.num_held))
                    started.append(CachedSequence(request, ids, shared, slot, self._free_rows.pop(), held))
                    self.running.append(started[-1])
        self.is_arranged &= not started
        return started

    def _match(self, ids: list[int], own: Sequence[CachedSequence]) -> tuple[CachedSequence | None, int]:
        """Return the sequence whose slot can go on with the most of these tokens but the last, and how many.

        One of the conversation's `own` comes first if the tokens continue it.
        """
        for each in own:
            if _share(each.ids[: each.num_cached], ids[:-1], each.num_cached):
                return each, each.num_cached
        best, most = None, _LEAST_SHARED - 1
        for each in (*self.kept, *self.running):
            cached = each.ids[: each.num_cached]
            # Most sequences are of other prompts: one comparison tells it.
            shared = common_prefix_length(cached, ids[:-1]) if _share(cached, ids[:-1], most + 1) else 0
            if shared > most and self._can_shorten(max(each.num_cached, each.num_held), shared):
                best, most = each, shared
        return (best, most) if best is not None else (None, 0)

    def _has_room(self, goes_on: bool) -> bool:
        """Return whether a sequence may start. A kept one gives its slot up only while fewer than half of the slots run."""
        is_full = len(self.running) + len(self.kept) >= self.num_slots
        may_evict = goes_on or 2 * len(self.running) < self.num_slots
        return len(self.running) < self.num_slots and (may_evict or not is_full)

    def _make_room(self, own: Sequence[CachedSequence], source: CachedSequence | None, shared: int) -> None:
        if source is not None and source in own and shared == source.num_cached:
            self.kept.remove(source)
        elif len(self.running) + len(self.kept) >= self.num_slots:
            # A branch takes a slot of its own conversation, in which its first tokens may be.
            self.kept.remove((own or self.kept)[0])

    def keep(self, sequences: Sequence[CachedSequence]) -> None:
        """Let these running sequences wait for their next requests in their slots."""
        self._free_rows += [each.row for each in sequences]
        self.running = [each for each in self.running if each not in sequences]
        self.kept += sequences
        self.is_arranged = False

    def drop_cancelled(self) -> None:
        """Free the slots of running sequences whose requests were cancelled."""
        if any(each.request.is_cancelled for each in self.running):
            self.keep([each for each in self.running if each.request.is_cancelled])
            self.kept = [each for each in self.kept if not each.request.is_cancelled]

    def arrange(self) -> tuple[dict[int, int], list[CachedSequence]]:
        """Give running sequences the first slots, and kept ones the next.

        Returns the source of each slot with other contents than before, all to be read before any is written; and the
        sequences to feed, in slots side by side, the fewest tokens first.
        """
        fed = sorted((each for each in self.running if each.num_missing > 0), key=lambda each: each.num_missing)
        others = [each for each in self.running if each not in fed]
        self.running = _stay_or_fill(others, 0) + fed
        placed = self.running + _stay_or_fill(self.kept, len(self.running))
        sources = {
            place: each.slot for place, each in enumerate(placed) if each.slot is not None and each.slot != place
        }
        for place, each in enumerate(placed):
            each.slot = place
        self.is_arranged = True
        return sources, fed


def _stay_or_fill(sequences: Sequence[CachedSequence], first: int) -> list[CachedSequence]:
    """Return the sequences in the order of the slots from `first` on: as many as can stay, the others between them."""
    places = range(first, first + len(sequences))
    stays = {each.slot: each for each in sequences if each.slot in places}
    others = iter([each for each in sequences if stays.get(each.slot) is not each])
    return [stays[place] if place in stays else next(others) for place in places]


def _share(first: list[int], second: list[int], count: int) -> bool:
    """Return whether both begin with the same `count` tokens."""
    return min(len(first), len(second)) >= count and first[:count] == second[:count]


@dataclass(eq=False, repr=False)
class TurnDecodeLoop:
    """Sampling of the turns that conversations request, in the slots of a cache that never exceeds the budget.

    `new_output` returns an output buffer of so many rows. If memory runs out, the turns under way start again in a cache of
    half the size, with the same random numbers; processes that sample together raise instead.
    """

    model: nn.Module
    requests: RequestSchedule
    kv_cache_bytes: int
    sampling: Sampling
    new_output: Callable[[int], OutputBuffer]
    on_tokens: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        self._table, self._cache, self._budget = SlotTable(0, 0), SlotCache(), self.kv_cache_bytes
        self._one_token: Cache | None = None
        self._num_forwarded: dict[Key, int] = {}  # tokens of a conversation that have been in the cache
        self._output: OutputBuffer
        self._draws: UniformDraws
        self._inputs: DecodeInputs

    def run(self) -> None:
        """Answer requests until the queue is closed."""
        while self.requests.collect(bool(self._table.running)):
            ended = self.requests.pop_ended()
            self._table.kept = [each for each in self._table.kept if each.request.conversation not in ended]
            self._table.drop_cancelled()
            try:
                self._admit()
                self._step()
                continue
            except (MemoryError, RuntimeError) as error:
                half = self._cache.num_slots * self._bytes(self._cache.num_columns) // 2
                must_raise = self.requests.queue.is_shared or half < self._bytes(max(self.requests.widths.values()))
                if must_raise or not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Outside of the handler: the error's frames hold tensors.
            logger.warning("Out of memory: turns start again with a KV cache of %d bytes. (%s)", half, reason)
            self._budget = half
            self._drop_cache()

    def _admit(self) -> None:
        """Start the requests that have room, and bring all of their tokens but the last into the cache."""
        if self.requests.waiting:
            self._fit_slots()
        was_arranged = self._table.is_arranged
        while self._start() or not self._table.is_arranged:
            was_arranged = False
            self._feed(self._arrange())
        if not was_arranged and self._table.running:
            self._inputs.restart([each.row for each in self._table.running])

    def _fit_slots(self) -> None:
        """Divide the cache for the conversations under way, into slots as wide as the longest of them needs."""
        if self._one_token is None:
            first = self.requests.waiting[0].ids[:1]
            self._one_token = prefill_prompts(self.model, [first], self.new_output(0).device)[1]
        columns, number = max(self.requests.widths.values()), self.requests.num_conversations
        most = min(number, self._budget // self._bytes(columns))
        num_slots = min(number, self._cache.most_slots(columns))
        if columns > self._cache.num_columns or 2 * num_slots <= most:
            new = self.requests.waiting[-1].max_tokens
            check_capacity(most, columns - new, new)
            self._drop_cache()
            self._make_cache(most, columns, number)
        elif self._cache.num_slots < min(num_slots, len(self.requests.widths)):
            self._arrange()
            self._cache.reserve(num_slots, columns, len(self._table.running) + len(self._table.kept))
            self._table.num_slots = num_slots

    def _bytes(self, num_columns: int) -> int:
        # Under autocast the cache is narrower than the parameters.
        dtype = None if self._one_token is None else storing_layers(self._one_token)[0].dtype
        return sequence_bytes(self.model, num_columns, dtype)

    def _drop_cache(self) -> None:
        """Let the turns under way wait for a start, and free the cache."""
        self.requests.waiting += [each.request for each in self._table.running]
        self._table, self._cache = SlotTable(0, 0), SlotCache()

    def _make_cache(self, num_slots: int, num_columns: int, num_rows: int) -> None:
        assert self._one_token is not None, "the first request has made it"
        self._cache = SlotCache()
        self._cache.reserve(num_slots, num_columns, 0)
        self._cache.allocate(self._one_token)
        self._table = SlotTable(num_slots, num_rows, self._cache.can_shorten)
        self._output = self.new_output(num_rows)
        self._draws = UniformDraws(num_rows, self.sampling, self._output.device)
        sampling = replace(self.sampling, num_generations=1)
        self._inputs = DecodeInputs(self.model, [[0]] * num_rows, sampling, self._output)

    def _start(self) -> bool:
        """Give the requests that have room their slots and rows; return whether there are any."""
        started = self._table.admit(self.requests.ready()) if self.requests.waiting else []
        if started:
            requests, rows = [each.request for each in started], [each.row for each in started]
            self.requests.start(requests)
            self._output.begin(rows, [request.max_tokens for request in requests])
            self._draws.make(rows, [request.key for request in requests])
            self._inputs.replace_prompts(rows, [each.ids for each in started])
        return bool(started)

    def _arrange(self) -> list[CachedSequence]:
        """Move sequences to their slots; return those to feed."""
        sources, fed = self._table.arrange()
        moved = [each for each in (*self._table.running, *self._table.kept) if each.slot in sources]
        self._cache.move(list(sources), list(sources.values()), max((each.num_cached for each in moved), default=0))
        self._cache.empty([slot for slot, each in enumerate(self._table.running) if each.num_cached == 0])
        return fed

    def _feed(self, sequences: Sequence[CachedSequence]) -> None:
        """Forward the tokens that the cache lacks, but the last, of sequences in slots side by side."""
        for part in split_feed(sequences, self._inputs.can_feed_together):
            ids, starts = [each.ids[each.num_cached : -1] for each in part], [each.num_cached for each in part]
            self._inputs.feed(self._cache, self._table.running.index(part[0]), ids, starts)
            self._count(part)

    def _count(self, fed: Sequence[CachedSequence]) -> None:
        """Report tokens that a feed padded or forwarded again as computed; other tokens of prompts and replies do not count."""
        num_computed = len(fed) * fed[-1].num_missing
        for each in fed:
            before = max(each.num_cached, self._num_forwarded.get(each.request.conversation, 0))
            each.num_cached = self._num_forwarded[each.request.conversation] = len(each.ids) - 1
            num_computed -= max(0, each.num_cached - before)
        if self.on_tokens is not None:
            self.on_tokens(0, num_computed)

    def _step(self) -> None:
        if running := self._table.running:
            num_columns = max(each.num_cached for each in running) + 1
            ended = self._inputs.step(self._cache, num_columns, self._draws)
            self.requests.step += 1
            for each in running:
                each.num_cached += 1
            if any(ended):
                self._answer([each for each, has_ended in zip(running, ended, strict=True) if has_ended])

    def _answer(self, sequences: Sequence[CachedSequence]) -> None:
        """Answer the requests of ended turns, and keep their slots."""
        self.requests.queue.check_processes()
        for each, turn in zip(sequences, self._output.completions([each.row for each in sequences]), strict=True):
            each.ids = [*each.ids, *turn.ids.tolist()]
            self._num_forwarded[each.request.conversation] = each.num_cached
            self.requests.end_turn(each.request.conversation)
            each.request.resolve(SampledTurn(turn.ids.tolist(), turn.logprobs.tolist(), turn.finish_reason))
        self._table.keep(sequences)


def split_feed(sequences: Sequence[CachedSequence], together: bool) -> Iterator[list[CachedSequence]]:
    """Yield the sequences of each forward, in order: those that lack about as many tokens, within bounds of tokens and mask."""
    part: list[CachedSequence] = []
    for each in sequences:
        num_tokens = each.num_missing * (len(part) + 1)
        num_columns = max(len(other.ids) for other in (*part, each))
        fits = num_tokens <= MAX_PREFILL and num_tokens * num_columns <= MAX_MASK
        if part and not (together and fits and each.num_missing <= _MAX_RATIO * part[0].num_missing):
            yield part
            part = []
        part.append(each)
    if part:
        yield part
