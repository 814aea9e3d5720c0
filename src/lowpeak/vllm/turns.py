"""Turns of conversations over one or more vLLMs: a request of ids each, started when it arrives and there is room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from lowpeak.errors import LostEngineError
from lowpeak.ranks import Ranks
from lowpeak.records import FinishReason
from lowpeak.rollout import Key, SampledTurn, TurnQueue, TurnRequest
from lowpeak.vllm.protocol import Adapter, Answer, Vllm
from lowpeak.vllm.requests import SequenceRequest

_POLL_SECONDS = 0.01  # of ranks that share an engine, while no conversation of any of them has a turn to sample


@dataclass(eq=False)
class Turn:
    """A turn that waits or runs; `request` is None if it is another rank's."""

    sequence: SequenceRequest
    request: TurnRequest | None

    @property
    def conversation(self) -> Key:
        return self.sequence.serial, self.sequence.number


@dataclass(eq=False)
class TurnLoop:
    """Samples the turns of a queue until all ranks of the engine have closed theirs.

    vllms       each with the adapter that its requests name
    ranks       of one engine: they start the same requests in the same order, and each answers its own
    make        returns the request for a turn, or raises EngineError
    capacity    returns how many of these turns may run at once
    check       returns valid answers by their indices, or raises
    timeout     seconds for one turn
    """

    queue: TurnQueue
    ranks: Ranks
    vllms: Sequence[tuple[Vllm, Adapter | None]]
    make: Callable[[TurnRequest], SequenceRequest]
    capacity: Callable[[Sequence[SequenceRequest]], int]
    check: Callable[[Sequence[SequenceRequest], Sequence[Answer]], Sequence[Answer]]
    timeout: float | None
    steps: bool  # the engine is in this process
    _waiting: list[Turn] = field(default_factory=list)
    _running: dict[Future[Answer], Turn] = field(default_factory=dict)
    _ages: dict[Key, int] = field(default_factory=dict)
    _homes: dict[Key, int] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)
    _lost: LostEngineError | None = None

    def run(self) -> list[int]:
        """Return the lengths of all sampled turns.

        After one of several vLLMs is lost no turn starts any more, and the error is raised once those of the others are answered.
        """
        try:
            while self._take():
                self._start()
                if self.steps and self._running:
                    self.vllms[0][0].step()
                self._deliver()
                if self._lost is not None and not self._running:
                    raise self._lost
        finally:
            for future in list(self._running):
                future.cancel()
        return self._lengths

    def _take(self) -> bool:
        """Add what has arrived on any rank; return whether any rank's queue is open."""
        is_alone = self.ranks.world_size == 1
        must_step = self.steps and bool(self._running)
        arrivals = self.queue.take(wait=not must_step, seconds=None if is_alone else _POLL_SECONDS)
        for conversation in arrivals.ended:
            self._homes.pop(conversation, None)
        if is_alone:
            # Ranks that step together would have to agree.
            self._drop(arrivals.cancelled)
        has_news, is_open = self.ranks.max([bool(arrivals.requests), not arrivals.is_closed])
        if has_news:
            with self.ranks.propagate_errors():
                own = [self.make(request) for request in arrivals.requests]
            for rank, sequences in enumerate(self.ranks.gather(own)):
                requests = arrivals.requests if rank == self.ranks.rank else [None] * len(sequences)
                self._waiting += map(Turn, sequences, requests)
        return bool(is_open)

    def _drop(self, requests: Sequence[TurnRequest]) -> None:
        """Stop work on turns that nobody waits for."""
        self._waiting = [turn for turn in self._waiting if turn.request not in requests]
        for future in [future for future, turn in self._running.items() if turn.request in requests]:
            del self._running[future]
            future.cancel()

    def _start(self) -> None:
        """Start waiting turns while there is room, those of the oldest conversations first.

        So few conversations are under way at once, and their keys and values stay in the prefix caches.
        """
        if not self._waiting or self._lost is not None:
            return
        for turn in self._waiting:
            self._ages.setdefault(turn.conversation, len(self._ages))
        self._waiting.sort(key=lambda turn: self._ages[turn.conversation])
        room = self.capacity([turn.sequence for turn in (*self._waiting, *self._running.values())]) - len(self._running)
        starting, self._waiting = self._waiting[: max(0, room)], self._waiting[max(0, room) :]
        for turn in starting:
            vllm, adapter = self.vllms[self._home(turn.conversation)]
            future = vllm.start(replace(turn.sequence.request, adapter=adapter), self.timeout)
            self._running[future] = turn
            future.add_done_callback(lambda _: self.queue.wake())

    def _home(self, conversation: Key) -> int:
        """Return the index of the conversation's vLLM, whose prefix cache has its earlier turns: first the least busy one."""
        if conversation not in self._homes:
            busy, count = Counter(self._homes.values()), len(self.vllms)
            # Several callers may share the vLLMs: they do not all begin with the first one.
            self._homes[conversation] = min(range(count), key=lambda i: (busy[i], (i + conversation[0]) % count))
        return self._homes[conversation]

    def _deliver(self) -> None:
        """Answer the requests of finished turns, if the weights that sampled them are known."""
        answered: list[tuple[Turn, Answer]] = []
        for future in [future for future in self._running if future.done()]:
            turn = self._running.pop(future)
            try:
                answered.append((turn, future.result()))
            except LostEngineError as error:
                self._lost = self._lost or error
        if not answered:
            return
        turns, answers = zip(*answered, strict=True)
        valid: Mapping[int, Answer]
        try:
            valid = dict(enumerate(self.check([turn.sequence for turn in turns], answers)))
        except LostEngineError as error:
            valid, self._lost = error.finished, self._lost or error
        for index, answer in valid.items():
            self._lengths.append(len(answer.ids))
            if (request := turns[index].request) is not None:
                reason: FinishReason = "stop" if answer.finish_reason == "stop" else "length"
                request.answer.set_result(SampledTurn(list(answer.ids), list(answer.logprobs), reason))
