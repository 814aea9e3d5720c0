"""Conversations of five turns on the native engine, with tools that wait: `python -m benchmarks.turns [--quick]`.

A Qwen2-shaped model with random weights on one thread; a prompt's tokens are random, and so are the replies of the tools. Useful
tokens are those that must be forwarded: a group's prompt once, and all others of a conversation but its last. Idle are the seconds
in which the engine has nothing to compute, since all conversations wait. Peaks are of processes of their own, above
that of a process without a rollout; one turn is a completion as long as the conversation's limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.process import run_apart
from benchmarks.harness.report import print_result, versions
from lowpeak.arguments.sampling import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache_bytes import bytes_per_token
from lowpeak.rollout.native.engine import NativeEngine
from lowpeak.rollout.turns import Arrivals, TurnQueue, TurnRequest, turn_key

_VOCABULARY, _PROMPT, _LIMIT, _ENDS = 512, 40, 216, tuple(range(480, 512))
_WAITS: dict[str, Callable[[random.Random], float]] = {
    "none": lambda rng: 0.0,
    "0.1 s": lambda rng: 0.1,
    "heavy tail": lambda rng: 2.0 if rng.random() < 0.05 else 0.05,
}


class TimedQueue(TurnQueue):
    """A queue that measures for how many seconds the engine has nothing to do."""

    idle = 0.0

    def take(self, wait: bool, seconds: float | None = None) -> Arrivals:
        start = time.perf_counter()
        arrivals = super().take(wait, seconds)
        self.idle += time.perf_counter() - start
        return arrivals


class Conversations:
    """Conversations of up to `num_turns`, in a thread of their own; `slowest` are the seconds that one waits for its tools."""

    def __init__(self, prompts: list[Prompt], sampling: Sampling, waits: str, num_turns: int = 5) -> None:
        self._prompts, self._sampling, self._wait, self._num_turns = prompts, sampling, _WAITS[waits], num_turns
        self.useful, self.turns, self.slowest = 0, 0, 0.0

    def run(self, engine: NativeEngine) -> None:
        owners = [(prompt, number) for prompt in self._prompts for number in range(self._sampling.num_generations)]
        queue = TimedQueue(len(owners))
        self.useful = sum(len(prompt.ids) - 1 for prompt in self._prompts)
        thread = threading.Thread(target=asyncio.run, args=(self._converse_all(queue, owners),))
        thread.start()
        engine.sample_turns(queue, self._sampling)
        thread.join()
        self.idle = queue.idle

    async def _converse_all(self, queue: TurnQueue, owners: list[tuple[Prompt, int]]) -> None:
        await asyncio.gather(*(self._converse(queue, *owner) for owner in owners))
        queue.close()

    async def _converse(self, queue: TurnQueue, prompt: Prompt, number: int) -> None:
        key, completion, waited = (prompt.serial, number), list[int](), 0.0
        rng = random.Random(f"{self._sampling.rollout} {key}")
        for turn in range(self._num_turns):
            if turn:
                seconds = self._wait(rng)
                reply = [rng.randrange(_ENDS[0]) for _ in range(rng.randrange(4, 12))]
                if len(completion) + len(reply) >= self._sampling.max_new_tokens:
                    break
                waited += seconds
                await asyncio.sleep(seconds)
                completion += reply
            room = self._sampling.max_new_tokens - len(completion)
            ids = [*prompt.ids, *completion]
            request = TurnRequest(key, ids, room, turn_key(key, completion))
            completion += (await asyncio.wrap_future(queue.submit(request))).ids
            self.turns += 1
        queue.end(key)
        self.useful += len(completion)
        self.slowest = max(self.slowest, waited)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Return seconds, forwarded and useful tokens of `request["rollouts"]` calls, and the seconds that the slowest one waits."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, max_position_embeddings=512, initializer_range=0.1, eos_token_id=None, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model, forwarded = Qwen2ForCausalLM(config).eval(), Counter[str]()
    count = lambda module, args, kwargs: forwarded.update(tokens=kwargs["input_ids"].numel(), forwards=1)  # noqa: E731
    model.register_forward_pre_hook(count, with_kwargs=True)
    budget = request["slots"] * (_PROMPT + _LIMIT) * bytes_per_token(model)
    engine = NativeEngine(lambda: nullcontext(model), SimpleNamespace(eos_token_id=None), lambda: budget)
    engine.load((), 0)
    rng, found, start, cpu, idle = random.Random(0), Counter[str](), time.perf_counter(), time.process_time(), 0.0
    ids = [tuple(rng.randrange(_ENDS[0]) for _ in range(_PROMPT)) for _ in range(request["prompts"])]
    prompts, slowest = [Prompt(i, each, "") for i, each in enumerate(ids)], 0.0
    for rollout in range(request["rollouts"]):
        ends = () if request["waits"] == "one turn" else _ENDS
        sampling = Sampling(4, _LIMIT, rollout=rollout, stop_token_ids=ends)
        if request["waits"] == "one turn":
            engine.generate(prompts, sampling)
            continue
        conversations = Conversations(prompts, sampling, request["waits"])
        conversations.run(engine)
        found.update(useful=conversations.useful, turns=conversations.turns)
        slowest, idle = slowest + conversations.slowest, idle + conversations.idle
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu_s": cpu, "idle_s": idle, "slowest_s": slowest, **forwarded, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two prompts, one rollout, no heavy tail")
    quick = parser.parse_args().quick
    prompts, rollouts = (2, 1) if quick else (8, 2)
    found: dict[str, dict[str, Any]] = {}
    columns = (
        "tools wait",
        "slots",
        "seconds",
        "CPU",
        "idle",
        "slowest one's tools",
        "forwarded per useful token",
        "peak MB",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for waits in ("none", "0.1 s", *(() if quick else ("heavy tail",)), "one turn"):
        for slots in (4 * prompts, 2 * prompts):
            request = {"waits": waits, "slots": slots, "prompts": prompts, "rollouts": rollouts}
            side = run_apart("benchmarks.turns", request)
            bare = run_apart("benchmarks.turns", {**request, "rollouts": 0})
            side["peak_mb"] = round(side["peak_rss_mb"] - bare["peak_rss_mb"], 1)
            found[f"{waits}, {slots} slots"] = side
            ratio = side.get("tokens", 0) / side["useful"] if side.get("useful") else float("nan")
            seconds = " | ".join(f"{side[name]:.2f}" for name in ("seconds", "cpu_s", "idle_s", "slowest_s"))
            shown = f"{seconds} | {ratio:.3f} | {side['peak_mb']}"
            print(f"| {waits} | {slots} | {shown} |", flush=True)
    print_result({"benchmark": "turns", "found": found, "versions": versions()})


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    else:
        main()
