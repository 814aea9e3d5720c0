"""Turns of conversations over one or more vLLMs: a request of ids each, started when it arrives and there is room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import cast

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
    make        returns the request for a turn; `check` returns valid answers; both raise EngineError
    capacity    returns how many of these requests may run at once; `timeout` is the seconds of each
    version     of the weights, which turns tell in the background; a lost vLLM's turns go to the others there
    """

    queue: TurnQueue
    ranks: Ranks
    vllms: Sequence[tuple[Vllm, Adapter | None]]
    in_process: bool
    make: Callable[[TurnRequest], SequenceRequest]
    capacity: Callable[[Sequence[SequenceRequest]], int]
    check: Callable[[int, Sequence[SequenceRequest], Sequence[Answer]], Sequence[Answer]]
    timeout: float | None
    version: int | None = None
    lengths: list[int] = field(default_factory=list)
    _waiting: list[Turn] = field(default_factory=list)
    _running: dict[Future[Answer], tuple[int, Turn]] = field(default_factory=dict)
    _ages: dict[Key, int] = field(default_factory=dict)
    _live: list[int] = field(default_factory=list)
    _lost: LostEngineError | None = None

    @property
    def awaited_version(self) -> int | None:
        """The version of the weights that turns in the background need, as long as the loop exists."""
        return self.version

    def run(self) -> LostEngineError | None:
        """Sample all turns; after a vLLM is lost, raise once the other vLLMs' turns are answered.

        In the background its error is returned, if another vLLM took over.
        """
        self._live = list(range(len(self.vllms)))
        try:
            while self._take():
                if self._waiting and self._fatal is None:
                    self._start()
                if self.in_process and self._running:
                    self.vllms[0][0].step()
                for home in range(len(self.vllms)):
                    self._deliver(home)
                if self._fatal is not None and not self._running:
                    raise self._fatal
        finally:
            for future in self._running:
                future.cancel()
        return self._lost

    @property
    def _fatal(self) -> LostEngineError | None:
        """The error of a lost vLLM whose turns no other takes over."""
        return None if self.version is not None and self._live else self._lost

    def _take(self) -> bool:
        """Add what has arrived on any rank; return whether any rank's queue is open."""
        must_step = self.in_process and bool(self._running)
        arrivals = self.queue.take(not must_step, _POLL_SECONDS if self.ranks.world_size > 1 else None)
        self._drop_cancelled()
        has_news, is_open = self.ranks.max([bool(arrivals.requests), not arrivals.is_closed])
        if has_news:
            with self.ranks.propagate_errors():
                own = [self.make(request) for request in arrivals.requests]
            for rank, sequences in enumerate(self.ranks.gather(own)):
                is_own = rank == self.ranks.rank
                self._waiting += zip(sequences, arrivals.requests if is_own else [None] * len(sequences), strict=True)
        return bool(is_open)

    def _drop_cancelled(self) -> None:
        """End turns whose requests were cancelled; ranks that share an engine sample them to their ends."""
        if self.ranks.world_size > 1:
            return
        self._waiting = [turn for turn in self._waiting if not (turn[1] and turn[1].is_cancelled)]
        for future in [each for each, (_, turn) in self._running.items() if turn[1] and turn[1].is_cancelled]:
            del self._running[future]
            future.cancel()

    def _start(self) -> None:
        """Start waiting turns while there is room, the oldest conversations' first: their prefixes are still cached."""
        for sequence, _ in self._waiting:
            self._ages.setdefault(sequence.key[:2], len(self._ages))
        self._waiting.sort(key=lambda turn: self._ages[turn[0].key[:2]])
        sequences = [sequence for sequence, _ in (*self._waiting, *(turn for _, turn in self._running.values()))]
        room = max(0, self.capacity(sequences) - len(self._running))
        starting, self._waiting = self._waiting[:room], self._waiting[room:]
        for sequence, request in starting:
            home = self._home(sequence)
            vllm, adapter = self.vllms[home]
            future = vllm.start(replace(sequence.request, adapter=adapter), self.timeout)
            self._running[future] = home, (sequence, request)
            future.add_done_callback(lambda _: self.queue.wake())

    def _home(self, sequence: SequenceRequest) -> int:
        """Return the index of the vLLM that samples all turns of a conversation, which its prefix cache has."""
        return self._live[(sequence.serial + sequence.number) % len(self._live)]

    def _deliver(self, home: int) -> None:
        """Answer the requests of a vLLM's finished turns, if they are valid."""
        answered, unanswered, lost = list[tuple[Turn, Answer]](), list[Turn](), self._lost
        for future in [each for each, (own, _) in self._running.items() if own == home and each.done()]:
            _, turn = self._running.pop(future)
            try:
                answered.append((turn, future.result()))
            except LostEngineError as error:
                unanswered.append(turn)
                lost = error
        try:
            valid = self._valid(home, answered)
        except LostEngineError as error:
            valid, lost = error.finished, error
        for index, (turn, _) in enumerate(answered):
            if index in valid:
                self._answer(turn[1], valid[index])
            else:
                unanswered.append(turn)
        if lost is not self._lost:
            self._lose(home, lost, unanswered)

    def _valid(self, home: int, answered: Sequence[tuple[Turn, Answer]]) -> Mapping[int, Answer]:
        if not answered:
            return {}
        sequences, answers = [sequence for (sequence, _), _ in answered], [answer for _, answer in answered]
        return dict(enumerate(self.check(home, sequences, answers)))

    def _answer(self, request: TurnRequest | None, answer: Answer) -> None:
        self.lengths.append(len(answer.ids))
        if request is not None:
            reason = cast(FinishReason, answer.finish_reason)
            request.resolve(SampledTurn(list(answer.ids), list(answer.logprobs), reason, self.version))

    def _lose(self, home: int, error: LostEngineError | None, unanswered: Sequence[Turn]) -> None:
        """Note the loss of a vLLM; its turns wait for another one, if the loop goes on."""
        self._lost = error
        if self.version is None:
            return
        if home in self._live:
            self._live.remove(home)
        self._waiting += unanswered
        for future in [each for each, (own, _) in self._running.items() if own == home]:
            _, turn = self._running.pop(future)
            future.cancel()
            self._waiting.append(turn)
