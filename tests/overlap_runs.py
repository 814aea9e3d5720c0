"""Runs whose (scripted) servers generate with a model of their own, from the weights that were pushed to them."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from peft import LoraConfig

from fake_vllm import scripted
from lowpeak.environments import EnvironmentEngine
from lowpeak.vllm.protocol import Answer
from scripted_turns import Score, calling_model, questions
from small_runs import make, rows
from tiny_models import tiny_model

RANK = 2
LORA = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class Sampler:
    """A script that samples from the weights of the vLLM it speaks for; `lag` takes those of so many pushes before.

    `delays` is a seed of random pauses before answers; `asked` are the requests by (version, prompt, seed). `model` is the
    policy of a run with conversations. With `max_loras` it serves adapters, whose rank is `RANK`.
    """

    def __init__(self, lag=0, delays=None, most=0.004, model=None, max_loras=0):
        self.vllm = scripted(self, max_model_len=512, max_loras=max_loras)
        self._lag = lag
        self._delays = None if delays is None else random.Random(delays)
        self._most = most
        self._model = (tiny_model() if model is None else copy.deepcopy(model)).eval()
        self._snapshots = {}
        self._lock = threading.Lock()
        self.asked = []
        self.snapshots_of = {}

    def __call__(self, request):
        if self._delays is not None:
            time.sleep(self._delays.random() * self._most)
        with self._lock, torch.no_grad():
            version = self._load(request)
            seed = request.params.get("seed", 0)
            self.asked.append((version, request.prompt_ids, seed))
            draws = np.random.Generator(np.random.Philox(key=seed))
            ids, logprobs = list(request.prompt_ids), []
            for _ in range(request.params["max_tokens"]):
                row = self._model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                token = int(torch.searchsorted(row.exp().cumsum(0), draws.random()).clamp(max=len(row) - 1))
                ids.append(token)
                logprobs.append(float(row[token]))
                if token in request.params["stop_token_ids"]:
                    break
        ids = tuple(ids[len(request.prompt_ids) :])
        return Answer(ids, tuple(logprobs), "stop" if ids[-1] in request.params["stop_token_ids"] else "length")

    def _load(self, request):
        """Load the weights that the request asks for, or those of `lag` pushes before; return their version."""
        version, weights = self.vllm.weights_of(request)
        if version not in self._snapshots:
            pieces = {name: torch.cat([piece.view(-1) for piece in each]) for name, each in weights.items()}
            self._snapshots[version] = pieces
        pushed = list(self._snapshots)
        chosen = version if self._lag == 0 else pushed[max(0, len(pushed) - 1 - self._lag)]
        found = self._snapshots[chosen]
        for name, parameter in self._model.named_parameters():
            parameter.copy_(found[name].view_as(parameter))
            left, right = (found.get(f"base_model.model.{name.removesuffix('weight')}lora_{x}.weight") for x in "BA")
            if left is not None:
                parameter.add_(left.view(-1, RANK) @ right.view(RANK, -1))
        return chosen


def run_ahead(folder, samplers, staleness, kind="GRPO", **changes):
    """A run of six steps over these samplers' servers."""
    settings = {
        "max_completion_length": 3, "max_steps": 6, "use_vllm": True, "vllm_mode": "server", "old_policy": "sampler",
        "vllm_server_base_url": [f"http://127.0.0.1:{i + 1}" for i in range(len(samplers))], "max_staleness": staleness,
        "data": rows(10), **changes,
    }  # fmt: skip
    settings = {name: value for name, value in settings.items() if value is not ...}
    run = make(kind, folder, **settings)
    connect(run, samplers)
    return run


def connect(run, samplers, **changes):
    """Give the run's engines the samplers' servers in place of those at the addresses, and other `changes`."""
    collectors = [run.collector] if run.pipeline is None else run.pipeline.collectors
    for i, collector in enumerate(collectors):
        vllms = tuple(sampler.vllm for sampler in samplers[i :: len(collectors)])
        engine, has_turns = collector.engine, isinstance(collector.engine, EnvironmentEngine)
        connected = replace(engine.engine if has_turns else engine, connect=lambda vllms=vllms: vllms, **changes)
        collector.engine = replace(engine, engine=connected) if has_turns else connected


class Delayed(Score):
    """An environment whose methods take up to `most` seconds; `events` counts what happens to all, `open` are those not closed."""

    delays, most = random.Random(0), 0.0
    events: ClassVar = Counter()
    open: ClassVar = set()
    _is_busy = False

    def reset(self, seed, **row):
        self._pause("reset")
        self.open.add(self)
        super().reset(**row)
        return f" {seed % 7}"

    def increase(self, by: int) -> int:
        """Add to the total.

        Args:
            by: How much.
        """
        self.events["overlapping"] += self._is_busy
        self._is_busy = True
        self._pause("increase")
        self._is_busy = False
        return super().increase(by)

    def close(self):
        self.open.discard(self)

    @classmethod
    def _begin(cls, seed):
        cls.delays, cls.most = random.Random(seed), 0.0 if seed is None else 0.02
        cls.events.clear()
        cls.open.clear()

    @classmethod
    def _pause(cls, event):
        cls.events[event] += 1
        time.sleep(cls.delays.random() * cls.most)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    Delayed._pause("add")
    return a + b


def totals(environments, completions, **columns):
    """A reward of what the environments hold, and of the number of messages."""
    return [each.total / 9 + len(messages) for each, messages in zip(environments, completions, strict=True)]


def talk(seed=None):
    """Settings of a run whose policy calls a function and an environment, with delays of this seed."""
    Delayed._begin(seed)
    model, tokenizer = calling_model()
    return {
        "model": model, "tokenizer": tokenizer, "data": questions(), "tools": [add], "environment_factory": Delayed,
        "reward_funcs": [totals], "max_completion_length": 40, "adam_epsilon": 1e-3,
    }  # fmt: skip
