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

_POLL_SECONDS = 0.01  # of ranks that share an engine, while no turn runs

Turn = tuple[SequenceRequest, TurnRequest | None]  # None: another rank's


@dataclass(eq=False)
class TurnLoop:
    """Samples the turns of a queue until all ranks of the engine have closed theirs.

    ranks       of one engine: they start the same requests in the same order, and each answers its own
    vllms       each with the adapter that its requests name; `in_process`: there is one, which computes in `step`
    make        returns the request for a turn, or raises EngineError
    capacity    returns how many of these requests may run at once
    check       returns the answers if they are valid, or raises
    timeout     seconds for one turn
    """

    queue: TurnQueue
    ranks: Ranks
    vllms: Sequence[tuple[Vllm, Adapter | None]]
    in_process: bool
    make: Callable[[TurnRequest], SequenceRequest]
    capacity: Callable[[Sequence[SequenceRequest]], int]
    check: Callable[[Sequence[SequenceRequest], Sequence[Answer]], Sequence[Answer]]
    timeout: float | None
    lengths: list[int] = field(default_factory=list)
    _waiting: list[Turn] = field(default_factory=list)
    _running: dict[Future[Answer], Turn] = field(default_factory=dict)
    _homes: dict[Key, tuple[int, int]] = field(default_factory=dict)
    _lost: LostEngineError | None = None

    def run(self) -> None:
        """Sample all turns; after a vLLM is lost, raise once the other vLLMs' turns are answered."""
        try:
            while self._take():
                if self._lost is None:
                    self._start()
                if self.in_process and self._running:
                    self.vllms[0][0].step()
                self._deliver()
                if self._lost is not None and not self._running:
                    raise self._lost
        finally:
            for future in self._running:
                future.cancel()

    def _take(self) -> bool:
        """Add what has arrived on any rank; return whether any rank's queue is open."""
        must_step = self.in_process and bool(self._running)
        arrivals = self.queue.take(not must_step, _POLL_SECONDS if self.ranks.world_size > 1 else None)
        for conversation in arrivals.ended:
            self._homes.pop(conversation, None)
        has_news, is_open = self.ranks.max([bool(arrivals.requests), not arrivals.is_closed])
        if has_news:
            with self.ranks.propagate_errors():
                own = [self.make(request) for request in arrivals.requests]
            for rank, sequences in enumerate(self.ranks.gather(own)):
                is_own = rank == self.ranks.rank
                self._waiting += zip(sequences, arrivals.requests if is_own else [None] * len(sequences), strict=True)
        return bool(is_open)

    def _start(self) -> None:
        """Start waiting turns while there is room, the oldest conversations' first: their prefixes are still cached."""
        if not self._waiting:
            return
        self._waiting.sort(key=lambda turn: self._home(turn[0]))
        sequences = [sequence for sequence, _ in (*self._waiting, *self._running.values())]
        room = max(0, self.capacity(sequences) - len(self._running))
        starting, self._waiting = self._waiting[:room], self._waiting[room:]
        for sequence, request in starting:
            vllm, adapter = self.vllms[self._home(sequence)[1]]
            future = vllm.start(replace(sequence.request, adapter=adapter), self.timeout)
            self._running[future] = sequence, request
            future.add_done_callback(lambda _: self.queue.wake())

    def _home(self, sequence: SequenceRequest) -> tuple[int, int]:
        """Return the age of a turn's conversation, and the index of its vLLM, whose prefix cache has its earlier turns."""
        conversation, homes = sequence.key[:2], self._homes.values()
        if conversation not in self._homes:
            loads, count = Counter(home for _, home in homes), len(self.vllms)
            # Several callers may share the vLLMs: they do not all begin with the first one.
            home = min(range(count), key=lambda i: (loads[i], (i + sequence.serial) % count))
            self._homes[conversation] = max((age for age, _ in homes), default=0) + 1, home
        return self._homes[conversation]

    def _deliver(self) -> None:
        """Answer the requests of finished turns, if they are valid."""
        answered: list[tuple[Turn, Answer]] = []
        for future in [future for future in self._running if future.done()]:
            turn = self._running.pop(future)
            try:
                answered.append((turn, future.result()))
            except LostEngineError as error:
                self._lost = self._lost or error
        if not answered:
            return
        try:
            checked = self.check([turn[0] for turn, _ in answered], [answer for _, answer in answered])
            valid: Mapping[int, Answer] = dict(enumerate(checked))
        except LostEngineError as error:
            valid, self._lost = error.finished, self._lost or error
        for index, answer in valid.items():
            self.lengths.append(len(answer.ids))
            if (request := answered[index][0][1]) is not None:
                reason: FinishReason = "stop" if answer.finish_reason == "stop" else "length"
                request.answer.set_result(SampledTurn(list(answer.ids), list(answer.logprobs), reason))
