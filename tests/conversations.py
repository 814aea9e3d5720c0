"""Conversations over an engine that samples turns: each turn is followed by the same tokens, as if a tool had replied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from lowpeak.arguments import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Prompt
from lowpeak.rollout.engine import TurnEngine
from lowpeak.rollout.turns import Key, SampledTurn, TurnQueue, TurnRequest, turn_key

REPLY = (5, 6)
Turns = list[tuple[tuple[int, ...], SampledTurn]]  # the ids before each turn, and the turn


def converse(
    engine: TurnEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    num_turns: int = 3,
    seconds: Callable[[Key, int], float] = lambda conversation, turn: 0.0,
) -> dict[Key, Turns]:
    """Return the turns of each conversation; a tool takes `seconds`."""
    queue, said = TurnQueue(), {}
    keys = [(prompt, number) for prompt in prompts for number in range(sampling.num_generations)]

    def talk(prompt: Prompt, number: int) -> None:
        key = (prompt.serial, number)
        ids, turns = list(prompt.ids), said.setdefault(key, [])
        try:
            for turn in range(num_turns):
                request = TurnRequest(key, tuple(ids), sampling.max_new_tokens, turn_key(key, ids[len(prompt.ids) :]))
                answer = queue.submit(request).result(60)
                turns.append((tuple(ids), answer))
                time.sleep(seconds(key, turn))
                ids += [*answer.ids, *REPLY]
        except EngineError:
            pass  # sample_turns raises it
        finally:
            queue.end(key)

    threads = [threading.Thread(target=talk, args=each, daemon=True) for each in keys]

    def close() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        queue.close()

    threading.Thread(target=close, daemon=True).start()
    engine.sample_turns(queue, sampling)
    return {key: said[key] for key in sorted(said)}


def ids_of(said: dict[Key, Turns]) -> list[list[tuple[list[int], list[int]]]]:
    """The token ids before and of each turn."""
    return [[(list(ids), turn.ids) for ids, turn in turns] for turns in said.values()]
