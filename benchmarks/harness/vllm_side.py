"""Generates completions of given lengths with vLLM in this process: `python -m benchmarks.harness.vllm_side REQUEST`.

The model, prompts and lengths are those of counting.py: a row's limit is its length, and no token ends it. Rows go all at
once, as the engine sends them (no more run than the cache holds, the next as one ends), or in waves of which each waits for
the last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.harness.counting import CountingRequest, make_model, make_prompts
from benchmarks.harness.report import print_result
from lowpeak.config.rollout import Sampling
from lowpeak.config.vllm import ColocateSettings, VllmSettings
from lowpeak.ranks import Ranks
from lowpeak.rollout.native.budget import bytes_per_token
from lowpeak.rollout.vllm.colocated import Blueprint, ColocatedVllm
from lowpeak.rollout.vllm.requests import Row, parameters
from lowpeak.rollout.vllm.vllm import Request
from lowpeak.rollout.vllm.waves import form_waves, rows_that_fit
from lowpeak.rollout.vllm.weights.push import push
from lowpeak.strategies.accelerated import Replicated

SETTINGS = VllmSettings(ColocateSettings(engine_kwargs={"skip_tokenizer_init": True}))


class NoTokenizer:
    """Nothing is written for vLLM, which is told to load none."""

    def save_pretrained(self, folder: Any) -> None:
        """Write nothing."""


def build(model: Any, request: CountingRequest) -> ColocatedVllm:
    """A vLLM with the model's weights, whose KV cache holds `slots` full rows."""
    length = request.prompt_length + request.max_new_tokens
    block = 128  # vLLM's on CPUs: a row takes whole ones
    room = request.slots * -(-length // block) * block * bytes_per_token(model)
    blueprint = Blueprint(
        config=model.config,
        tokenizer=NoTokenizer(),
        architecture=type(model).__name__,
        dtype="float32",
        device=torch.device("cpu"),
        kv_cache_bytes=room + (4 << 20),
        trust_remote_code=False,
        seed=0,
    )
    vllm = ColocatedVllm(blueprint, SETTINGS, Ranks())
    push(Replicated(Accelerator(cpu=True)).slices(model, 8 << 20, None), [vllm], SETTINGS, 0)
    return vllm


def make_rows(request: CountingRequest) -> list[Row]:
    """A row per completion, as long as its length says."""
    sampling = Sampling(request.num_generations, request.max_new_tokens)
    rows: list[Any] = []
    for i, ids in enumerate(make_prompts(request)):
        for number in range(request.num_generations):
            length = request.lengths[i * request.num_generations + number]
            params = {**parameters(sampling, (), None), "max_tokens": length, "seed": len(rows)}
            rows.append(Row(i, number, Request(ids, params)))
    return rows


def generate(vllm: ColocatedVllm, waves: Sequence[Sequence[Row]]) -> tuple[int, float]:
    """Tokens written, and CPU seconds."""
    vllm.resume()  # prompts of the last time are not in the cache
    start, written = time.process_time(), 0
    for wave in waves:
        written += sum(len(answer.ids) for answer in vllm.complete([row.request for row in wave]))
    return written, time.process_time() - start


def run_side(request: CountingRequest) -> dict[str, Any]:
    """CPU seconds of all rows as the engine sends them, and in waves."""
    model, rows = make_model(request), make_rows(request)
    with closing(build(model, request)) as vllm:
        fitting = rows_that_fit([vllm.facts()], request.prompt_length + request.max_new_tokens, 1, ColocateSettings())
        ways = {"waves": form_waves(rows, fitting), "engine": [rows]}
        generate(vllm, [rows[:1]])  # the first one pays for more than itself
        found = {name: [generate(vllm, waves) for _ in range(request.repeats)] for name, waves in ways.items()}
    tokens = found["waves"][0][0]
    seconds = {name: round(statistics.median(s for _, s in runs), 4) for name, runs in found.items()}
    return {"tokens": tokens, "num_waves": len(ways["waves"]), "cpu_seconds": seconds}


if __name__ == "__main__":
    print_result(run_side(CountingRequest(**json.loads(sys.argv[1]))))
