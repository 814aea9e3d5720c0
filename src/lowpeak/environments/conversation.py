"""One conversation as one completion: the policy's turns, and its environment's replies."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lowpeak.environments.append import Message
from lowpeak.environments.calls import ParsedTurn
from lowpeak.environments.tools import MethodError, Reply, ToolEnvironment, warn_of_failure
from lowpeak.environments.turn_format import TurnFormat
from lowpeak.records import Completion, Conversation, FinishReason, Prompt, Turn
from lowpeak.rollout import Key, SampledTurn, TurnQueue, TurnRequest, turn_key


@dataclass(eq=False)
class ConversationRun:
    """A conversation under way: it samples a turn, lets the environment reply, and goes on until either ends it.

    `max_tokens` bounds the tokens of the completion, the environment's among them. The state changes after whole turns, so
    that a conversation whose engine has failed goes on from its last turn. `counts` gets `malformed` and `environment_failures`.
    The turns of a `recorded` completion are taken in place of sampled ones, as long as the tokens before them are equal.
    """

    key: Key
    prompt: Prompt
    environment: ToolEnvironment
    turn_format: TurnFormat
    max_tokens: int
    counts: Counter[str]
    has_failed: bool = False
    recorded: Completion | None = None
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _loss_mask: list[bool] = field(default_factory=list)
    _versions: list[int | None] = field(default_factory=list)
    _turns: list[Turn] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def is_over(self) -> bool:
        return self.completion is not None

    async def run(self, queue: TurnQueue) -> None:
        """Take turns until the conversation is over, and tell the queue; return early if the engine fails."""
        while not self.is_over:
            try:
                sampled = await self._sample(queue)
            except Exception:
                # The engine reports it. Other conversations still finish their tools' calls, which must not run twice.
                return
            previous_role = self._messages[-1]["role"] if self._messages else "user"
            parsed = self.turn_format.parse(sampled.ids, previous_role)
            self.counts["malformed"] += parsed.num_malformed
            start = time.perf_counter()
            reply, reply_ids = await self._reply(sampled, parsed)
            self._add(sampled, parsed, reply, reply_ids, time.perf_counter() - start)
        queue.end(self.key)

    async def _sample(self, queue: TurnQueue) -> SampledTurn:
        if self.recorded is not None and (turn := self._recorded_turn(self.recorded)) is not None:
            return turn
        self.recorded = None
        ids = [*self.prompt.ids, *self._ids]
        request = TurnRequest(self.key, ids, self.max_tokens - len(self._ids), turn_key(self.key, self._ids))
        return await asyncio.wrap_future(queue.submit(request))

    def _recorded_turn(self, recorded: Completion) -> SampledTurn | None:
        """Return the turn that follows in `recorded`; None if another prompt or reply came before it."""
        start, ids, is_sampled = len(self._ids), recorded.ids.tolist(), recorded.loss_mask.tolist()
        if recorded.prompt_ids != self.prompt.ids or ids[:start] != self._ids or start == len(ids):
            return None
        stop = start + (is_sampled[start:].index(False) if False in is_sampled[start:] else len(ids) - start)
        versions = recorded.policy_versions
        return SampledTurn(
            ids[start:stop],
            recorded.logprobs[start:stop].tolist(),
            recorded.finish_reason if stop == len(ids) else "stop",
            None if versions is None else int(versions[start]),
        )

    async def _reply(self, sampled: SampledTurn, parsed: ParsedTurn) -> tuple[Reply, list[int]]:
        """Return the environment's reply and its token ids; an empty one if it leaves no room for another turn."""
        if self.has_failed:
            return Reply(), []
        room = self.max_tokens - len(self._ids) - len(sampled.ids) - 1
        shortest = [{"role": "tool", "name": call.name, "content": ""} for call in parsed.calls]
        # Calls do not run if even empty results leave no room.
        if sampled.finish_reason == "length" or (shortest and len(self._append(sampled, shortest)) > room):
            return Reply(), []
        try:
            high, low = turn_key(self.key, [*self.prompt.ids, *self._ids, *sampled.ids])
            reply = await self.environment.step(parsed, f"{high:08x}{low:08x}")
        except MethodError as failure:
            self.has_failed = True
            self.counts["environment_failures"] += 1
            warn_of_failure(self.environment.instance, failure.method, failure.error)
            return Reply(), []
        ids = self._ids_within(room, sampled, reply.messages)
        return (reply, ids) if ids else (Reply(reward=reply.reward), [])

    def _ids_within(self, room: int, sampled: SampledTurn, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the messages; none if they do not fit."""
        # To tokenize a text of megabytes would take seconds and hundreds of megabytes.
        may_fit = bool(messages) and self.turn_format.appender.may_fit(messages, room)
        ids = self._append(sampled, messages) if may_fit else []
        return ids if len(ids) <= room else []

    def _append(self, sampled: SampledTurn, messages: Sequence[Message]) -> list[int]:
        return self.turn_format.appender.append(sampled.ids[-1], messages)

    def _add(
        self, sampled: SampledTurn, parsed: ParsedTurn, reply: Reply, reply_ids: list[int], seconds: float
    ) -> None:
        self._ids += [*sampled.ids, *reply_ids]
        self._logprobs += [*sampled.logprobs, *[0.0] * len(reply_ids)]
        self._loss_mask += [*[True] * len(sampled.ids), *[False] * len(reply_ids)]
        self._versions += [sampled.policy_version] * (len(sampled.ids) + len(reply_ids))
        self._messages += [parsed.message, *(reply.messages if reply_ids else ())]
        last = len(self._ids) - len(reply_ids) - 1
        self._turns.append(Turn(last, reply.reward, seconds))
        if not reply_ids:
            self._end(sampled.finish_reason)

    def _end(self, finish_reason: FinishReason) -> None:
        """Keep the conversation as tensors: Python's numbers take many times the memory while it waits for others."""
        conversation = Conversation(
            tuple(self._messages), tuple(self._turns), self.environment.instance, self.has_failed
        )
        self.completion = Completion(
            ids=torch.tensor(self._ids, dtype=torch.int32),
            logprobs=torch.tensor(self._logprobs, dtype=torch.float32),
            loss_mask=torch.tensor(self._loss_mask, dtype=torch.bool),
            finish_reason=finish_reason,
            policy_versions=None if None in self._versions else torch.tensor(self._versions, dtype=torch.int32),
            conversation=conversation,
        )
        self.recorded, self._ids, self._logprobs, self._loss_mask, self._versions = None, [], [], [], []
