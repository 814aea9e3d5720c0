"""One conversation: the policy's turns, and what its environment answers, as one completion."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lowpeak.environments.append import Message, TurnAppender
from lowpeak.environments.calls import CallParser, ParsedTurn
from lowpeak.environments.tools import Reply, ToolEnvironment, warn_of_failure
from lowpeak.errors import CheckpointError, EngineError
from lowpeak.records import Completion, Conversation, FinishReason, Prompt, Turn
from lowpeak.rollout import Key, SampledTurn, TurnQueue, TurnRequest, turn_key


@dataclass(frozen=True)
class TurnFormat:
    """What a chat template with its options writes around turns; `parser` is None without tools."""

    appender: TurnAppender
    parser: CallParser | None
    decode: Callable[[Sequence[int]], str]

    def parse(self, ids: Sequence[int], previous_role: str) -> ParsedTurn:
        if self.parser is not None:
            return self.parser.parse(ids, previous_role)
        return ParsedTurn({"role": "assistant", "content": self.decode(ids)})


@dataclass(eq=False)
class ConversationRun:
    """A conversation under way: it samples a turn, lets the environment reply, and goes on until either ends it.

    `max_tokens` bounds the tokens of the completion, the environment's among them. The state changes after whole turns, so
    that a conversation whose engine has failed goes on from its last turn. `counts` gets `malformed` and `environment_failures`.
    """

    key: Key
    prompt: Prompt
    environment: ToolEnvironment
    turn_format: TurnFormat
    max_tokens: int
    counts: Counter[str]
    has_failed: bool = False
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _loss_mask: list[bool] = field(default_factory=list)
    _turns: list[Turn] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _finish_reason: FinishReason = "stop"
    _is_over: bool = False

    async def run(self, queue: TurnQueue) -> None:
        """Take turns until the conversation is over, and tell the queue; return early if the engine fails."""
        while not self._is_over:
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
        ids = [*self.prompt.ids, *self._ids]
        request = TurnRequest(self.key, ids, self.max_tokens - len(self._ids), turn_key(self.key, self._ids))
        return await asyncio.wrap_future(queue.submit(request))

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
        except (CheckpointError, EngineError):
            raise
        except Exception as error:  # get_turn_reward's: errors of tools are text
            self.has_failed = True
            self.counts["environment_failures"] += 1
            warn_of_failure(self.environment.instance, "get_turn_reward", error)
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
        self._messages += [parsed.message, *(reply.messages if reply_ids else ())]
        last = len(self._ids) - len(reply_ids) - 1
        self._turns.append(Turn(last, reply.reward, seconds))
        self._finish_reason, self._is_over = sampled.finish_reason, not reply_ids

    def completion(self, prompt_ids: tuple[int, ...] | None = None) -> Completion:
        """Return the conversation as one completion; `prompt_ids` replaces the prompt of its group, if given."""
        conversation = Conversation(
            tuple(self._messages), tuple(self._turns), self.environment.instance, self.has_failed
        )
        return Completion(
            ids=torch.tensor(self._ids, dtype=torch.int32),
            logprobs=torch.tensor(self._logprobs, dtype=torch.float32),
            loss_mask=torch.tensor(self._loss_mask, dtype=torch.bool),
            finish_reason=self._finish_reason,
            prompt_ids=prompt_ids,
            conversation=conversation,
        )
