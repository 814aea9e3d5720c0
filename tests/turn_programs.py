"""Conversations of several turns with tools that wait, over an engine; what each of their requests was answered."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lowpeak.arguments.sampling import Sampling
from lowpeak.records import Completion, Prompt
from lowpeak.rollout.engine import TurnEngine
from lowpeak.rollout.native.engine import NativeEngine
from lowpeak.rollout.turns import Key, SampledTurn, TurnQueue, TurnRequest, turn_key

Delay = Callable[[Key, int], float]  # of a conversation's turn, in seconds
Turns = list[tuple[tuple[int, ...], SampledTurn]]  # the ids before each turn, and the turn
REPLY = [5, 6]


def reply(ids: Sequence[int]) -> list[int]:
    """Return the tokens of a tool's answer, which follow from what it is given."""
    rng = random.Random(hashlib.sha256(str(list(ids)).encode()).hexdigest())
    return [rng.randrange(2, 13) for _ in range(rng.randrange(1, 9))]


@dataclass
class Programs:
    """Conversations that take at most `num_turns` and `limit` tokens after the prompt, with the tools' replies between them."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    num_turns: int = 4
    reply: Callable[[Sequence[int]], list[int]] = reply
    limit: int | None = None  # None: of a completion
    delay: Delay = lambda conversation, turn: 0.0
    longest_turn: int = 1 << 20
    is_ready: Callable[[], bool] = lambda: True  # tools wait until it is
    on_end: Callable[[], object] = lambda: None
    failures: list[BaseException] = field(default_factory=list)
    log: list[tuple[TurnRequest, SampledTurn]] = field(default_factory=list)

    def run(self, engine: TurnEngine) -> list[tuple[TurnRequest, SampledTurn]]:
        """Return all requests with their turns, in the order of conversations."""
        owners = [(prompt, number) for prompt in self.prompts for number in range(self.sampling.num_generations)]
        queue = TurnQueue(len(owners))
        thread = threading.Thread(target=asyncio.run, args=(self._converse_all(queue, owners),), daemon=True)
        thread.start()
        try:
            engine.sample_turns(queue, self.sampling)
        finally:
            thread.join(60)
        assert not thread.is_alive()
        return sorted(self.log, key=lambda pair: (pair[0].conversation, len(pair[0].ids)))

    async def _converse_all(self, queue: TurnQueue, owners: Sequence[tuple[Prompt, int]]) -> None:
        conversations = [self._converse(queue, *owner) for owner in owners]
        ends = await asyncio.gather(*conversations, return_exceptions=True)
        self.failures += [end for end in ends if end is not None]
        self.on_end()
        queue.close()

    async def _converse(self, queue: TurnQueue, prompt: Prompt, number: int) -> None:
        conversation, completion = (prompt.serial, self.sampling.first_completion + number), list[int]()
        limit = self.limit or self.sampling.max_new_tokens
        for turn in range(self.num_turns):
            room = min(self.longest_turn, limit - len(completion))
            key = turn_key(conversation, completion)
            request = TurnRequest(conversation, [*prompt.ids, *completion], room, key)
            sampled = await asyncio.wrap_future(queue.submit(request))
            self.log.append((request, sampled))
            completion += sampled.ids
            answer = self.reply(completion)
            if len(completion) + len(answer) >= limit:
                break
            await asyncio.sleep(self.delay(conversation, turn))
            while not self.is_ready():
                await asyncio.sleep(0.01)
            completion += answer
        queue.end(conversation)


def converse(
    engine: TurnEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    num_turns: int = 3,
    delay: Delay = lambda conversation, turn: 0.0,
) -> dict[Key, Turns]:
    """Return the turns of each conversation, each of any length up to that of a completion and followed by `REPLY`."""
    most = sampling.max_new_tokens
    programs = Programs(prompts, sampling, num_turns, lambda ids: REPLY, limit=1 << 20, delay=delay, longest_turn=most)
    turns: dict[Key, Turns] = {}
    for request, turn in programs.run(engine):
        turns.setdefault(request.conversation, []).append((tuple(request.ids), turn))
    return turns


def ids_of(turns: dict[Key, Turns]) -> list[list[tuple[list[int], list[int]]]]:
    """Return the token ids before and of each turn."""
    return [[(list(ids), turn.ids) for ids, turn in each] for each in turns.values()]


def by_generate(engine: NativeEngine, request: TurnRequest, sampling: Sampling) -> Completion:
    """Return what `generate` answers to one request by itself."""
    serial, number = request.key
    alone = replace(sampling, num_generations=1, max_new_tokens=request.max_tokens, first_completion=number)
    return engine.generate([Prompt(serial, tuple(request.ids), "")], alone)[0].completions[0]
