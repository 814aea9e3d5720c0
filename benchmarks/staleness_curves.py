"""Accuracy of stale rollouts: `python -m benchmarks.staleness_curves [--quick] [--seeds 0 1 2 3 4] [--runs "N = 1"]`.

Noisy sort, GRPO, 160 steps of 32 prompts x 8 completions, on servers in this process that generate with the weights that were
pushed to them. Each run has its `max_staleness` and the default loss; `uncorrected` trains on rollouts of the weights one push
before, as N = 1 does, with neither a correction nor the sampler's log-probs, which a run with max_staleness refuses. Held-out
accuracy after the last step, sampled / greedy, by transformers' `generate()`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import lowpeak
from benchmarks.harness.accuracy import measure
from benchmarks.harness.report import mean, print_result, versions
from benchmarks.harness.scripted_vllm import ScriptedVllm, connect
from benchmarks.harness.task import HELD_OUT_SEED, NUM_PROMPTS, NUM_STEPS, noisy_sort, trainer_settings, warm_start
from lowpeak.rollout.native.cache import call_with_cache
from lowpeak.vllm.protocol import Answer, Request


@dataclass(frozen=True)
class Setting:
    """A run's staleness; `lag` is how many pushes the servers' weights are behind."""

    staleness: int
    lag: int = 0
    corrected: bool = True


SETTINGS: Mapping[str, Setting] = {f"N = {n}": Setting(n) for n in (0, 1, 2, 4)} | {
    "uncorrected": Setting(0, lag=1, corrected=False)
}


class SamplingVllm(ScriptedVllm):
    """Samples prompts of one length, each token by its request's seed, with the weights of `lag` pushes before."""

    def __init__(self, model: Any, lag: int) -> None:
        super().__init__()
        self._model = model.eval()
        self._pushed: deque[Mapping[str, Tensor]] = deque(maxlen=lag + 1)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._pushed.append(weights)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self._pushed[0][name].view_as(parameter))

    @torch.no_grad()
    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        params = requests[0].params
        length = params["max_tokens"]
        draws = torch.tensor(
            np.stack([np.random.Generator(np.random.Philox(key=r.params["seed"])).random(length) for r in requests])
        )
        inputs, cache = torch.tensor([request.prompt_ids for request in requests]), DynamicCache()
        ids, logprobs = [], []
        for i in range(length):
            rows = call_with_cache(self._model, cache, inputs, None, None).log_softmax(-1)
            below = rows.double().exp().cumsum(-1) < draws[:, i : i + 1]
            inputs = below.sum(-1, keepdim=True).clamp(max=rows.shape[-1] - 1)
            ids.append(inputs)
            logprobs.append(rows.gather(-1, inputs))
        found = zip(torch.cat(ids, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        return [_answer(row, values, set(params["stop_token_ids"])) for row, values in found]


def _answer(ids: list[int], logprobs: list[float], ends: set[int]) -> Answer:
    count = next((i + 1 for i, token in enumerate(ids) if token in ends), None)
    return Answer(tuple(ids[:count]), tuple(logprobs[:count]), "length" if count is None else "stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two steps of one seed: whether it runs at all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args(sys.argv[1:])
    seeds, steps, held_out = (options.seeds[:1], 2, 8) if options.quick else (options.seeds, NUM_STEPS, 1024)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.runs}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            start = Path(folder) / f"start-{seed}"
            warm_start(start, seed)
            for name in options.runs:
                accuracy = train(SETTINGS[name], seed, steps, held_out, start, Path(folder) / f"{seed}-{name}")
                found[name].append(accuracy)
                print(f"| {seed} | {name} | {accuracy['sampled']:.3f} / {accuracy['greedy']:.3f} |", flush=True)
    means = {name: round(mean([each["sampled"] for each in rows]), 4) for name, rows in found.items()}
    print_result({"benchmark": "staleness_curves", "means": means, "runs": found, "versions": versions()})


def train(setting: Setting, seed: int, steps: int, held_out: int, start: Path, folder: Path) -> dict[str, float]:
    """Train a copy of the start and measure it."""
    groups = max(1, setting.staleness)
    args = lowpeak.GRPOConfig(
        **trainer_settings("grpo", seed, steps, folder), use_vllm=True, vllm_mode="server", max_staleness=setting.staleness,
        vllm_server_base_url=",".join(f"http://127.0.0.1:{i + 1}" for i in range(groups)),
        vllm_importance_sampling_correction=setting.corrected,
    )  # fmt: skip
    tokenizer = noisy_sort.make_tokenizer()
    trainer = lowpeak.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start), reward_funcs=noisy_sort.sorted_exactly, args=args,
        train_dataset=noisy_sort.make_prompts(steps * NUM_PROMPTS, seed), processing_class=tokenizer,
    )  # fmt: skip
    connect(trainer, [SamplingVllm(noisy_sort.make_model(0), setting.lag) for _ in range(groups)])
    trainer.train()
    prompts = noisy_sort.draw_prompts(held_out, HELD_OUT_SEED, held_out=True)
    return measure(trainer.model.eval(), tokenizer, prompts, [noisy_sort.answer_to(prompt) for prompt in prompts])


if __name__ == "__main__":
    main()
