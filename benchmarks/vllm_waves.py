"""Decode steps of vLLM by how many sequences may run at once: `python -m benchmarks.vllm_waves`.

A model of vLLM's scheduler: a sequence starts when the cache has room for its prompt, and the youngest is preempted when the next
tokens do not fit; it computes its prompt and completion again. No vLLM and no GPU is needed, and nothing is known of the seconds of
a step, which grow with the sequences in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.harness.report import print_result
from lowpeak.arguments.vllm import ColocateSettings
from lowpeak.vllm.protocol import EngineInfo, Request
from lowpeak.vllm.requests import CompletionLengths, wave_capacity

_PROMPT, _LIMIT, _MEAN, _COUNT = 256, 8_192, 1_244, 512
_CACHE = 19 * (_PROMPT + _LIMIT)  # tokens: 7B in bf16, 0.3 of 80 GB


def draw_lengths(kind: str, generator: random.Random) -> list[int]:
    """Return lengths of completions with about the mean `_MEAN`."""
    draws = {
        "equal": lambda: _MEAN,
        "exponential": lambda: generator.expovariate(1 / _MEAN),
        "a tenth of 8,192": lambda: _LIMIT if generator.random() < 0.1 else 472,
    }
    return [max(1, min(_LIMIT, int(draws[kind]()))) for _ in range(_COUNT)]


def run_sequences(lengths: Sequence[int], capacity: int) -> tuple[int, int, int]:
    """Return the decode steps, the preemptions, and the tokens that preempted sequences compute again."""
    waiting, running, done = list(range(len(lengths)))[::-1], list[int](), [0] * len(lengths)
    steps = preemptions = repeated = used = 0
    while waiting or running:
        while waiting and len(running) < capacity and used + _PROMPT + done[waiting[-1]] + len(running) < _CACHE:
            started = waiting.pop()
            running.append(started)
            used += _PROMPT + done[started]
            repeated += _PROMPT + done[started] if done[started] else 0
        while used + len(running) > _CACHE:
            youngest = running.pop()
            waiting.append(youngest)
            used -= _PROMPT + done[youngest]
            preemptions += 1
        for number in running:
            done[number] += 1
        ended = [number for number in running if done[number] == lengths[number]]
        used += len(running) - sum(_PROMPT + lengths[number] for number in ended)
        running = [number for number in running if done[number] < lengths[number]]
        steps += 1
    return steps, preemptions, repeated


def main() -> None:
    engine = EngineInfo("", "", "", "bfloat16", _PROMPT + _LIMIT, 1_024, _CACHE)
    requests = [Request((0,) * _PROMPT, {"max_tokens": _LIMIT})] * _COUNT
    for kind in ("equal", "exponential", "a tenth of 8,192"):
        lengths, seen = draw_lengths(kind, random.Random(0)), CompletionLengths()
        for rollout in ("first", "second"):
            capacity = wave_capacity([engine], requests, seen, 1, ColocateSettings())
            steps, preemptions, repeated = run_sequences(lengths, capacity)
            computed = sum(lengths) + _COUNT * _PROMPT
            print_result(
                {
                    "lengths": kind,
                    "rollout": rollout,
                    "mean": sum(lengths) / _COUNT,
                    "at_once": capacity,
                    "steps": steps,
                    "preemptions": preemptions,
                    "repeated": repeated / computed,
                }
            )
            seen.add(lengths)


if __name__ == "__main__":
    main()
