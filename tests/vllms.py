"""Engines over scripted vLLMs, and prompts for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowpeak.config.rollout import Sampling
from lowpeak.config.vllm import ColocateSettings, VllmSettings
from lowpeak.ranks import Ranks
from lowpeak.records import Prompt, WeightSlice
from lowpeak.rollout.vllm.engine import Callers, PolicyFacts, VllmEngine
from lowpeak.rollout.vllm.scripted import FACTS, ScriptedVllm, scripted_prove, scripted_push

SETTINGS = VllmSettings(ColocateSettings())
SAMPLING = Sampling(num_generations=4, max_new_tokens=3)
END = 1


def prompts(count=3, length=4, first=0):
    """Prompts of different lengths whose first token tells them apart."""
    return [Prompt(first + i, tuple([2 + (first + i) % 9] * (length + i)), f"prompt {i}") for i in range(count)]


def said(request):
    """Tokens that tell the prompt and the seed; half of the completions end by themselves."""
    seed = request.params.get("seed", 0)
    return [request.prompt_ids[0], 2 + seed % 7, END if seed % 2 else 3]


def facts(**changes):
    return replace(FACTS, **changes)


def slices(values=(1.0, 2.0)):
    tensor = torch.tensor(values)
    yield WeightSlice("weight", (len(values),), torch.float32, 0, tensor)


def engine_over(*vllms, callers=None, adapter=None, push=scripted_push, prove=scripted_prove, **settings):
    """An engine over these vLLMs, awake and loaded with version 0."""
    made = VllmEngine(
        lambda: vllms,
        replace(SETTINGS, **settings),
        PolicyFacts(lambda sampling: {END, *sampling.stop_token_ids}, 13, adapter),
        callers or Callers(Ranks()),
        push,
        prove,
    )
    made.wake()
    made.load(slices(), 0)
    return made


def scripted(script=said, **changes):
    return ScriptedVllm(script, facts(**changes))
