"""Waves: rows that are asked together, as many as the engines' KV caches hold, and who answers which."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from lowpeak.batching.assign import assign
from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.misfit import Where, cache_share
from lowpeak.rollout.vllm.requests import Row
from lowpeak.rollout.vllm.vllm import Facts


def rows_that_fit(all_facts: Sequence[Facts], longest: int, num_callers: int, where: Where) -> int:
    """Rows of `longest` tokens that the engines' caches hold at once, shared evenly by so many callers.

    vLLM queues what does not fit and throws away the keys and values of what it has begun: a wave that fits is never
    computed twice. EngineError where an engine cannot hold one row.
    """
    total = 0
    for facts in all_facts:
        if facts.kv_tokens < longest:
            raise EngineError(
                f"One row of {longest} tokens (prompt and completion) does not fit vLLM's KV cache of {facts.kv_tokens} "
                f"tokens: {cache_share(where, 'raise')}, or generate fewer tokens."
            )
        total += min(facts.max_num_seqs, facts.kv_tokens // longest)
    return max(1, total // num_callers)


def form_waves(rows: Sequence[Row], capacity: int) -> list[list[Row]]:
    """The rows in as few waves of at most `capacity` as there can be, about equally large, longest prompts first.

    A prompt's rows stay in one wave where that makes no more waves; else its second part finds the prompt in the cache.
    """
    ordered = sorted(rows, key=lambda row: (-len(row.request.prompt_ids), row.serial, row.number))
    num_waves = -(-len(ordered) // capacity)
    waves, start = [], 0
    for wave in range(1, num_waves + 1):
        stop = _cut(ordered, start, wave, num_waves, capacity)
        waves.append(ordered[start:stop])
        start = stop
    return waves


def _cut(rows: Sequence[Row], start: int, wave: int, num_waves: int, capacity: int) -> int:
    """Where a wave ends that begins at `start`: between two prompts next to an even share, if all rows still fit."""
    even = len(rows) * wave // num_waves
    least = max(start + 1, len(rows) - capacity * (num_waves - wave))
    most = min(start + capacity, len(rows))
    between = [i for i in range(least, most + 1) if i == len(rows) or rows[i - 1].serial != rows[i].serial]
    if wave == num_waves:
        return len(rows)
    return min(between, key=lambda i: abs(i - even), default=min(max(even, least), most))


def share(wave: Sequence[Row], num_engines: int) -> list[list[int]]:
    """Which rows of a wave each engine answers: a prompt's rows together where there are prompts enough, even in tokens."""
    parts = [list(part) for _, part in groupby(range(len(wave)), key=lambda i: wave[i].serial)]
    if len(parts) < num_engines:
        parts = [[i] for i in range(len(wave))]
    shares = assign([_tokens(wave, part) for part in parts], num_engines)
    return [[i for number in mine for i in parts[number]] for mine in shares]


def _tokens(wave: Sequence[Row], part: Sequence[int]) -> int:
    """What a prompt's rows may cost: the prompt once, and completions of full length."""
    request = wave[part[0]].request
    return len(request.prompt_ids) + len(part) * int(request.params["max_tokens"])
