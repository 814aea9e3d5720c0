"""Turns of conversations: requests that arrive while a rollout runs, and the queue from which an engine takes them.

A conversation asks for one turn after another. A turn is a pure function of the weights and of its request: neither slots, ranks,
nor the order of arrival change its random numbers.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowpeak.errors import EngineError
from lowpeak.ranks import Ranks
from lowpeak.records import Completion, FinishReason

Key = tuple[int, int]  # two 32-bit words of the counter of a turn's random numbers


class SampledTurn(NamedTuple):
    """The tokens of one turn, its end token among them, with their log-probs.

    `policy_version` is that of the weights; None: the rollout's.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    policy_version: int | None = None


@dataclass(eq=False)
class TurnRequest:
    """One turn to sample after `ids`, the whole conversation so far, with at most `max_tokens` tokens.

    `conversation` is its prompt's serial number and its completion's number.
    """

    conversation: Key
    ids: Sequence[int]
    max_tokens: int
    key: Key
    answer: Future[SampledTurn] = field(default_factory=Future)
    is_cancelled: bool = False

    def resolve(self, turn: SampledTurn) -> None:
        """Answer the request, unless it was cancelled."""
        if not self.is_cancelled:
            self.answer.set_result(turn)


class Arrivals(NamedTuple):
    """Arrivals since the last look: new requests, and conversations that have ended."""

    requests: list[TurnRequest]
    ended: list[Key]
    is_closed: bool


class TurnQueue:
    """The way from conversations, in any thread, to the engine that samples their turns.

    answer = queue.submit(request)          # any thread; also end
    queue.close()                           # once the last conversation has ended

    with queue.answering():                 # the engine's thread; `wake` ends a `take` that waits
        while not (arrivals := queue.take(wait=not running)).is_closed:
            ...
            request.resolve(turn)
    """

    is_shared = False  # whether several processes sample each turn together

    def __init__(self, num_conversations: int = 0) -> None:
        """Open the queue; so many conversations make their first requests at once, 0 if they begin at any time."""
        self.num_conversations = num_conversations
        self._changed = threading.Condition()
        self._open: dict[int, TurnRequest] = {}  # unanswered requests by identity
        self._arrivals = Arrivals([], [], False)
        self._is_woken = False
        self._failure: BaseException = EngineError("the rollout is over: no further turn is sampled.")

    def submit(self, request: TurnRequest) -> Future[SampledTurn]:
        """Return the request's answer; EngineError is its result if the engine fails, or has ended."""
        # A future that runs cannot be cancelled by its waiter: the engine alone ends it.
        request.answer.set_running_or_notify_cancel()
        with self._changed:
            if self._arrivals.is_closed:
                request.answer.set_exception(self._failure)
                return request.answer
            self._open[id(request)] = request
            self._arrivals.requests.append(request)
            self._changed.notify()
        request.answer.add_done_callback(lambda _: self._open.pop(id(request), None))
        return request.answer

    def end(self, conversation: Key) -> None:
        """Tell the engine that a conversation has ended, so that it drops the conversation's cache."""
        with self._changed:
            self._arrivals.ended.append(conversation)
            self._changed.notify()

    def cancel(self, request: TurnRequest) -> None:
        """Tell the engine that nobody waits for the answer any more."""
        with self._changed:
            request.is_cancelled = not self.is_shared  # processes that sample together take it to its end
            self._open.pop(id(request), None)
            self._is_woken = True
            self._changed.notify()

    def close(self) -> None:
        """End the rollout: no conversation is left."""
        with self._changed:
            self._arrivals = self._arrivals._replace(is_closed=True)
            self._changed.notify()

    def wake(self) -> None:
        """End a `take` that waits, although nothing has arrived."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def take(self, wait: bool, seconds: float | None = None) -> Arrivals:
        """Return the arrivals; with `wait` not before there is one, or `seconds` have passed."""
        with self._changed:
            if wait:
                self._changed.wait_for(self._has_changed, seconds)
            taken, self._is_woken = self._arrivals, False
            self._arrivals = Arrivals([], [], taken.is_closed)
            return taken

    def _has_changed(self) -> bool:
        return self._is_woken or any(self._arrivals)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Close the queue after the block; unanswered and later requests fail with its error."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise
        finally:
            self.close()
            for request in list(self._open.values()):
                if not request.answer.done():
                    request.answer.set_exception(self._failure)

    def check_processes(self) -> None:
        """Raise EngineError if another process failed: turns that all sampled together are then invalid."""

    def sampling_by(self, model: Any) -> AbstractContextManager[None]:
        """Return a context for the forwards of the transformers model that samples the turns."""
        return nullcontext()


class GroupQueue(TurnQueue):
    """The queue of a tensor parallel group: rank 0 has the conversations, and all ranks take the same arrivals.

    The ranks exchange whether one has failed when they take arrivals, before each forward and before they answer: a failed
    rank joins no other exchange. The error of the lockstep names it.
    """

    is_shared = True

    def __init__(self, num_conversations: int, processes: Ranks) -> None:
        super().__init__(num_conversations)
        self._processes = processes
        self._has_failed = False
        self._raise_in_step: Callable[[], None]

    @contextmanager
    def sampling_by(self, model: Any) -> Iterator[None]:
        self._raise_in_step = model.forward.wait_in_step
        hook = model.register_forward_pre_hook(lambda *inputs: self.check_processes())
        try:
            yield
        except BaseException:
            if not self._has_failed:
                # The exchange that the other ranks wait in, or enter next.
                self._processes.max([1.0, 0.0, 0.0])
            raise
        finally:
            hook.remove()

    def take(self, wait: bool, seconds: float | None = None) -> Arrivals:
        is_first = self._processes.rank == 0
        taken = super().take(wait, seconds) if is_first else Arrivals([], [], False)
        has_news, is_closed = self._exchange(bool(taken.requests or taken.ended), taken.is_closed)
        if has_news:
            requests = [(each.conversation, each.ids, each.max_tokens, each.key) for each in taken.requests]
            requests, ended = self._processes.gather((requests, taken.ended))[0]
            if not is_first:
                taken = Arrivals([TurnRequest(*each) for each in requests], ended, False)
        return taken._replace(is_closed=bool(is_closed))

    def check_processes(self) -> None:
        self._exchange(False, False)

    def _exchange(self, *facts: bool) -> list[float]:
        """Return which facts hold on any process; EngineError if one has failed."""
        has_failed, *numbers = self._processes.max([0.0, *facts])
        self._has_failed = bool(has_failed)
        if self._has_failed:
            self._raise_in_step()
        return numbers


def turn_key(conversation: Key, ids: Sequence[int]) -> Key:
    """Return the key of the turn after these tokens of a completion; the first turn's is the conversation itself.

    So a conversation of one turn draws what `generate` draws.
    """
    if not ids:
        return conversation
    digest = hashlib.blake2b(array("q", [*conversation, *ids]).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def answer_in_rounds(queue: TurnQueue, sample: Callable[[Sequence[TurnRequest]], Sequence[Completion]]) -> None:
    """Answer until the queue is closed, for an engine that cannot admit requests while it samples.

    A round waits until every conversation that began has a request or has ended. A turn is cut to its `max_tokens`.
    """
    waiting: list[TurnRequest] = []
    begun: set[Key] = set()
    live: set[Key] = set()
    while True:
        arrivals = queue.take(wait=True)
        waiting = [request for request in (*waiting, *arrivals.requests) if not request.is_cancelled]
        asking = {request.conversation for request in waiting}
        begun |= asking | set(arrivals.ended)
        live = (live | asking) - set(arrivals.ended)
        if waiting and asking >= live and len(begun) >= queue.num_conversations:
            requests, waiting = waiting, []
            turns = sample(requests)
            queue.check_processes()
            for request, turn in zip(requests, turns, strict=True):
                room = request.max_tokens
                reason: FinishReason = turn.finish_reason if len(turn) <= room else "length"
                request.resolve(SampledTurn(turn.ids.tolist()[:room], turn.logprobs.tolist()[:room], reason))
        elif arrivals.is_closed:
            return
