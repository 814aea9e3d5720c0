"""A conversation that its environment's program drives, over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch

from lowpeak.arguments import Sampling
from lowpeak.data import TEMPLATE_ERRORS
from lowpeak.environments.append import Message
from lowpeak.environments.chat import ChatHistory
from lowpeak.environments.routes import OUT_OF_ROOM, RefusedError, Routes
from lowpeak.environments.token_tree import Match, TokenTree, TurnMessages, recorded_turns
from lowpeak.environments.tool_runner import ToolTimeoutError, text_of
from lowpeak.environments.tools import MethodError, ToolEnvironment, warn_of_failure
from lowpeak.environments.turn_bodies import (
    ChatRequest,
    TokenRequest,
    chat_response,
    read_chat_request,
    read_token_request,
    token_response,
)
from lowpeak.environments.turn_limits import TurnLimits
from lowpeak.errors import DataError, first_line
from lowpeak.records import Completion, Conversation, FinishReason, Prompt
from lowpeak.rollout import Key, SampledTurn, TurnQueue, TurnRequest, turn_key

_STOP_SECONDS = 5.0
_MOST_PENDING = 16  # requests of a conversation at once


@dataclass(eq=False)
class _PendingTurn:
    """A request that waits for its turn, of at most `room` tokens; `request` is the engine's."""

    run: ProgramRun
    tokens: TokenRequest
    room: int
    key: Key
    is_branch: bool
    context: tuple[Message, ...]
    chat: ChatRequest | None
    answer: Future[SampledTurn] = field(default_factory=Future)
    request: TurnRequest | None = None

    def cancel(self) -> None:
        self.run.cancel(self)

    def deliver(self) -> Mapping[str, Any]:
        return self.run.deliver(self)


@dataclass(eq=False)
class ProgramRun:
    """A conversation under way whose environment drives it: `run(endpoint)` asks for turns until it returns.

    Requests that an engine leaves unanswered wait for the next one, so that the program does not notice. The turns of a
    `recorded` completion answer the same requests. `counts` gets turns, refused requests, and failures of environments.
    `forget` gives the environment up for later conversations, since a thread that goes on still uses it. `add_prompt` gets the
    first request's tokens, which are the prompt.

    The environments' loop calls `run`, the routes' thread `ask`, `deliver` and `cancel`, the engine's `_answered`.
    """

    key: Key
    prompt: Prompt
    environment: ToolEnvironment
    chat: ChatHistory
    end_ids: Collection[int]
    sampling: Sampling
    limits: TurnLimits
    counts: Counter[str]
    routes: Routes
    rendering: Mapping[str, Any]  # the tokenizer and the template of its endpoint
    forget: Callable[[], object]
    add_prompt: Callable[[list[int]], object]
    recorded: Completion | None = None
    has_failed: bool = False
    _own_counts: Counter[str] = field(default_factory=Counter)
    _tree: TokenTree = field(default_factory=TokenTree)
    _pending: list[_PendingTurn] = field(default_factory=list)
    _num_equal: Counter[bytes] = field(default_factory=Counter)  # equal requests that are answered or wait
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _first: list[int] | None = None
    _num_turns: int = 0
    _is_exhausted: bool = False  # since the last turn
    _is_cut: bool = False  # since then, for want of room
    _refusal: str = ""
    _finish_reason: FinishReason = "stop"
    _last_active: float = field(default_factory=time.monotonic)
    _queue: TurnQueue | None = None
    _fail: Callable[[], object] = lambda: None
    _program: asyncio.Task[None] | None = None
    completion: Completion | None = None

    def __post_init__(self) -> None:
        self._recorded: Mapping[tuple[int, ...], list[SampledTurn]] = {}
        if self.recorded is not None:
            self._recorded = recorded_turns(self.recorded.prompt_ids or self.prompt.ids, self.recorded)

    @property
    def is_over(self) -> bool:
        return self.completion is not None

    @property
    def max_model_len(self) -> int:
        return len(self._first or self.prompt.ids) + self.limits.max_tokens

    async def run(self, queue: TurnQueue) -> None:
        """Let the program run until it is over, and tell the queue; return early if the engine fails."""
        loop, engine_failed = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._queue, self._fail = queue, partial(loop.call_soon_threadsafe, engine_failed.set)
            for pending in self._pending:
                self._send(pending)
        self._program = self._program or loop.create_task(self._drive())
        failure = loop.create_task(engine_failed.wait())
        try:
            await asyncio.wait({self._program, failure}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._program.cancel()
            raise
        finally:
            failure.cancel()
        if self._program.done():
            self._program.result()
            if not self.is_over:
                self._end()
            queue.end(self.key)

    async def stop(self) -> None:
        """End the program, if it is under way."""
        if self._program is not None:
            self._program.cancel()
            await asyncio.wait({self._program}, timeout=_STOP_SECONDS)

    async def _drive(self) -> None:
        endpoint = replace(self.routes.open(self), end_ids=self.end_ids, **self.rendering)
        self._last_active = time.monotonic()
        program = asyncio.ensure_future(self.environment.drive(endpoint))
        try:
            while not program.done() and self._seconds_left() != 0:
                await asyncio.wait({program}, timeout=self._seconds_left())
            if not program.done():
                self._own_counts["timeouts"] += 1
                self.forget()
                raise MethodError("run", ToolTimeoutError(f"no request within {self.limits.idle_seconds:g} seconds"))
            program.result()
        except MethodError as failure:
            # A program that had no tokens left was cut off, as a completion is.
            if not self._is_exhausted:
                self.has_failed = True
                self._own_counts["environment_failures"] += 1
                error = failure.error
                if self._refusal and self._refusal not in text_of(error):
                    error = RuntimeError(f"a request was refused ({self._refusal.rstrip('.')}) before {text_of(error)}")
                warn_of_failure(self.environment.instance, failure.method, error)
        finally:
            program.cancel()
            self.routes.end(endpoint)
            with self._lock:
                for pending in list(self._pending):
                    self._withdraw(pending)
                    if not pending.answer.done():
                        pending.answer.set_exception(RefusedError(409, "the conversation has ended."))

    def _seconds_left(self) -> float | None:
        """Return the seconds until the conversation ends without a request; None if there is no limit."""
        limit = self.limits.idle_seconds
        if limit is None or self._pending:
            return limit
        return max(0.0, limit - (time.monotonic() - self._last_active))

    def note_refusal(self, reason: str) -> None:
        self._own_counts["refused"], self._refusal = self._own_counts["refused"] + 1, reason

    def note_disconnect(self) -> None:
        self._own_counts["disconnected"] += 1

    def ask(self, path: str, body: Mapping[str, Any]) -> _PendingTurn:
        """Return the turn that a request asks for; RefusedError if the conversation takes no such request."""
        if not path.endswith("/chat/completions"):
            tokens = read_token_request(body, self.sampling, self.limits.vocabulary_size)
            return self._ask(tokens, None, None)
        chat = read_chat_request(body, self.sampling)
        try:
            history = self.chat.rendered(chat.messages, chat.tools)
        except (DataError, *TEMPLATE_ERRORS) as error:
            raise RefusedError(400, f"the chat template does not render the messages: {first_line(error)}.") from error
        return self._ask(TokenRequest(history.ids, chat.max_tokens, frozenset()), chat, history.new)

    def _ask(self, tokens: TokenRequest, chat: ChatRequest | None, new: Sequence[Message] | None) -> _PendingTurn:
        with self._lock:
            match = self._tree.match(tokens.ids)
            is_branch = self._is_branch(tokens.ids, match)
            self._check(tokens.ids, match, is_branch)
            room = self._room(tokens, match)
            if self._first is None:
                self._first = tokens.ids
                self.add_prompt(tokens.ids)
            key, num_equal_before = self._key(tokens.ids)
            pending = _PendingTurn(self, tokens, room, key, is_branch, self._context(tokens.ids, match, new), chat)
            pending.answer.set_running_or_notify_cancel()
            self._tree.note_reply(match, time.monotonic() - self._last_active)
            self._pending.append(pending)
            known = self._recorded.get(tuple(tokens.ids), [])
            if num_equal_before < len(known) and len(known[num_equal_before].ids) <= room:
                self._resolve(pending, known[num_equal_before])
            else:
                self._send(pending)
            return pending

    def _context(self, ids: list[int], match: Match, new: Sequence[Message] | None) -> tuple[Message, ...]:
        """Return the messages of the record before a turn; `new` are those of a chat's request."""
        if not self._num_turns:
            return ()
        return ({"role": "user", "content": self._decode(ids[match.length :])},) if new is None else tuple(new)

    def _is_branch(self, ids: list[int], match: Match) -> bool:
        if self._num_turns:
            return not match.ends_at_leaf
        return any(pending.tokens.ids != ids for pending in self._pending)

    def _check(self, ids: list[int], match: Match, is_branch: bool) -> None:
        """Raise RefusedError for a request beyond the limits of requests, turns, branches or the prompt."""
        limits = self.limits
        if len(self._pending) >= _MOST_PENDING:
            raise RefusedError(429, f"{_MOST_PENDING} requests of the conversation wait for their turns.")
        if limits.max_turns is not None and self._num_turns + len(self._pending) >= limits.max_turns:
            reason = f"the conversation has had {limits.max_turns} turns (max_tool_calling_iterations + 1)."
            self._exhaust(reason, is_cut=False)
        branches = max(1, self._tree.num_branches) + sum(pending.is_branch for pending in self._pending)
        if is_branch and branches >= limits.max_branches:
            raise RefusedError(
                400,
                f"the tokens do not continue the conversation after its first {match.length}, and it has max_branches="
                f"{limits.max_branches}: append to what was served, or raise max_branches.",
            )
        if self._first is None and limits.max_prompt_tokens is not None and len(ids) > limits.max_prompt_tokens:
            raise RefusedError(
                400,
                f"the prompt has {len(ids)} tokens, and the context leaves {limits.max_prompt_tokens}: shorten it, or lower "
                "max_completion_length.",
            )

    def _room(self, tokens: TokenRequest, match: Match) -> int:
        """Return the most tokens of a turn; RefusedError if there are none."""
        limits, num_before = self.limits, len(tokens.ids)
        num_new = num_before - match.length if self._num_turns else 0
        in_all = limits.max_branches * limits.max_tokens - self._tree.num_tokens - num_new
        room = min(in_all, limits.max_tokens if self._first is None else self.max_model_len - num_before)
        if room < 1:
            self._exhaust(
                f"no room is left: a path has {limits.max_tokens} tokens after its prompt (max_completion_length), and all paths "
                f"together {limits.max_branches} times as many (max_branches)."
            )
        return min(room, tokens.max_tokens or room)

    def _exhaust(self, reason: str, *, is_cut: bool = True) -> NoReturn:
        self._is_exhausted, self._is_cut = True, is_cut
        raise RefusedError(400, reason, OUT_OF_ROOM)

    def _key(self, ids: list[int]) -> tuple[Key, int]:
        """Return the key of a request's random numbers, and how many equal ones came before it."""
        first = self._first or ids
        follows = ids[: len(first)] == first
        name = _digest(ids)
        index = self._num_equal[name]
        self._num_equal[name] += 1
        # Negative numbers are no tokens: the first request has the key of a completion of one turn.
        marks = [*([] if follows else [-1]), *([-1 - index] if index else [])]
        return turn_key(self.key, [*(ids[len(first) :] if follows else ids), *marks]), index

    def _send(self, pending: _PendingTurn) -> None:
        """Ask the engine for a turn; without an engine it waits for the next one."""
        if self._queue is not None:
            request = TurnRequest(self.key, pending.tokens.ids, pending.room, pending.key)
            pending.request = request
            self._queue.submit(request).add_done_callback(partial(self._answered, request))

    def _answered(self, request: TurnRequest, future: Future[SampledTurn]) -> None:
        with self._lock:
            pending = next((each for each in self._pending if each.request is request), None)
            if pending is None:
                return
            if future.exception() is None:
                self._resolve(pending, future.result())
            else:
                self._queue = None
                self._fail()

    def _resolve(self, pending: _PendingTurn, turn: SampledTurn) -> None:
        stop_ids = pending.tokens.stop_ids
        end = next((i + 1 for i, token in enumerate(turn.ids) if token in stop_ids), len(turn.ids))
        cut = min(end, pending.room)
        if cut < len(turn.ids):
            turn = turn._replace(
                ids=turn.ids[:cut], logprobs=turn.logprobs[:cut], finish_reason="stop" if cut == end else "length"
            )
        pending.answer.set_result(turn)

    def cancel(self, pending: _PendingTurn) -> None:
        """Withdraw a request whose client has left.

        Of equal requests the last is withdrawn: whoever asked again gets the first one's answer, so that no random number depends
        on when the loss of a client is noticed.
        """
        with self._lock:
            if pending not in self._pending:
                return
            equal = [each for each in self._pending if each.tokens.ids == pending.tokens.ids and not each.answer.done()]
            last = pending if pending.answer.done() else equal[-1]
            pending.key, last.key = last.key, pending.key
            pending.request, last.request = last.request, pending.request
            self._withdraw(pending)

    def _withdraw(self, pending: _PendingTurn) -> None:
        self._pending.remove(pending)
        self._last_active = time.monotonic()
        self._num_equal[_digest(pending.tokens.ids)] -= 1
        if not self._num_turns and not self._pending:
            self._first = None
        if pending.request is not None and self._queue is not None:
            self._queue.cancel(pending.request)

    def deliver(self, pending: _PendingTurn) -> Mapping[str, Any]:
        """Add an answered turn to the conversation, and return the body of the response."""
        with self._lock:
            if pending not in self._pending:
                raise RefusedError(409, "the conversation has ended.")
            self._pending.remove(pending)
            self._last_active = time.monotonic()
            self._is_exhausted, self._is_cut, self._refusal = False, False, ""
            ids, turn, chat = pending.tokens.ids, pending.answer.result(), pending.chat
            name = f"{pending.key[0]:08x}{pending.key[1]:08x}"
            self._num_turns, self._finish_reason = self._num_turns + 1, turn.finish_reason
            if chat is None:
                message = {"role": "assistant", "content": self._decode(turn.ids)}
                content = token_response(name, ids, turn)
            else:
                parsed = self.chat.turn_format(chat.tools).parse(turn.ids, chat.messages[-1]["role"])
                self._own_counts["malformed"] += parsed.num_malformed
                self.chat.add([*chat.messages, parsed.message], chat.tools, [*ids, *turn.ids])
                message, content = parsed.message, chat_response(name, ids, turn, parsed)
            if self._has_room(ids, turn):
                self._tree.add(ids, turn, TurnMessages(pending.context, message))
            else:
                self._own_counts["dropped_turns"] += 1
            return content

    def _has_room(self, ids: Sequence[int], turn: SampledTurn) -> bool:
        """Return whether a turn is within the limits, though other requests were answered since it was asked for."""
        if not self._tree.num_branches:
            return True
        match, limits = self._tree.match(ids), self.limits
        num_new = len(ids) - match.length + len(turn.ids)
        is_kept = match.ends_at_leaf or self._tree.num_branches < limits.max_branches
        return is_kept and self._tree.num_tokens + num_new <= limits.max_branches * limits.max_tokens

    def _decode(self, ids: Sequence[int]) -> str:
        return self.chat.turn_format(()).decode(ids)

    def _end(self) -> None:
        """Keep the conversation as tensors; one without a turn has an end token that is not trained."""
        self.counts.update(self._own_counts)
        self.counts.update(programs=1, turns=self._num_turns, branches=self._tree.num_branches)
        if not self._tree.num_branches and not self.has_failed:
            self.has_failed = True
            self.counts["environment_failures"] += 1
            warn_of_failure(self.environment.instance, "run", RuntimeError("it ended without a turn"))
        conversation = Conversation((), (), self.environment.instance, self.has_failed)
        if not self._tree.num_branches:
            end = torch.tensor(sorted(self.end_ids)[:1] or [0], dtype=torch.int32)
            no_loss = torch.zeros(1, dtype=torch.bool)
            self.completion = Completion(end, torch.zeros(1), no_loss, "stop", conversation=conversation)
            return
        if self._tree.prompt != self.prompt.ids:
            self.prompt = replace(self.prompt, ids=self._tree.prompt, teacher_ids=None)
        reason: FinishReason = "length" if self._is_cut else self._finish_reason
        self.completion = self._tree.completion(reason, conversation)
        self._tree, self._recorded = TokenTree(), {}


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()
