"""Step times of rollouts ahead: `python -m benchmarks.overlap [--quick]`.

A server sleeps G seconds for a rollout, and the reward T: GRPO on a tiny model, whose own work takes some 0.05 s. G is a bulk,
which takes N groups of one N-th of the servers N times as long, and a tail of long completions, which does not; its seconds are
drawn with `--draw` (lognormal, sigma 0.5). Expected is max((N bulk + tail) / N, trained) + push, at N = 0 the sum. `trained` is T
and the step's own work, `busy` the servers' share of the whole run by their clocks. Seconds are means without the first N + 2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

import lowpeak
from benchmarks.harness.report import mean, print_result, versions
from benchmarks.harness.scripted_vllm import ScriptedVllm, connect
from benchmarks.harness.shapes import make_model, make_tokenizer
from lowpeak.vllm.protocol import Answer, Request

_TOKENS = 8


class SleepingVllm(ScriptedVllm):
    """A vLLM without a model, whose waves take the seconds that it draws; `busy` is their sum."""

    def __init__(self, bulk: float, tail: float, draw: bool, seed: int) -> None:
        super().__init__()
        self._bulk, self._tail, self._draw, self._random = bulk, tail, draw, random.Random(seed)
        self._stop = threading.Event()
        self.busy = 0.0

    def complete(self, requests: Sequence[Request], timeout: float | None = None) -> list[Answer]:
        seconds = self._bulk + self._tail * (self._random.lognormvariate(-0.125, 0.5) if self._draw else 1.0)
        self._stop.wait(seconds)
        self.busy += seconds
        return [_answer(request) for request in requests]

    def close(self) -> None:
        self._stop.set()


def _answer(request: Request) -> Answer:
    digest = hashlib.blake2b(str(request.params["seed"]).encode(), digest_size=_TOKENS).digest()
    return Answer(tuple(2 + byte % 200 for byte in digest), (-8.0,) * _TOKENS, "length")


def run(staleness: int, bulk: float, tail: float, training: float, steps: int, draw: bool) -> dict[str, Any]:
    """Train, and return seconds of a step after the first rollouts, and idle shares."""

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        time.sleep(training)
        return [float(sum(ids) % 7) for ids in completion_ids]

    groups = max(1, staleness)
    with tempfile.TemporaryDirectory() as folder:
        args = lowpeak.GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=8, num_generations=4, max_completion_length=_TOKENS,
            use_cpu=True, use_vllm=True, vllm_mode="server", max_staleness=staleness, save_strategy="no", report_to="none",
            vllm_server_base_url=",".join(f"http://127.0.0.1:{i + 1}" for i in range(groups)), disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        trainer = lowpeak.GRPOTrainer(
            model=make_model(64, 2, 4096), reward_funcs=reward, args=args, processing_class=make_tokenizer(4096),
            train_dataset=Dataset.from_list([{"prompt": f"w{301 + i}"} for i in range(64)]),
        )  # fmt: skip
        vllms = [SleepingVllm(bulk * groups, tail, draw, seed) for seed in range(groups)]
        connect(trainer, vllms)
        began = time.perf_counter()
        trainer.train()
        elapsed = time.perf_counter() - began
        rows = [json.loads(line) for line in (Path(folder) / "journal" / "steps.jsonl").read_text().splitlines()][
            groups + 2 :
        ]
    steady = [row["step_time"] for row in rows]
    names = ("idle/servers", "idle/trainer", "time/sync", "time/wait_rollout")
    found = {name: round(mean([row[name] for row in rows]), 3) for name in names if all(name in row for row in rows)}
    busy = sum(vllm.busy for vllm in vllms) / groups / elapsed
    push = mean([row["time/sync"] for row in rows])
    trained = mean([row["step_time"] - row["time/rollout"] for row in rows]) - push
    generated = bulk + tail / groups
    expected = (max(generated, trained) if staleness else generated + trained) + push
    shares = {"of_expected": round(mean(steady) / expected, 3), "trained": round(trained, 3), "busy": round(busy, 3)}
    return {"seconds": round(mean(steady), 3), **shares, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run of each N")
    parser.add_argument("--draw", action="store_true", help="draw the tail's seconds")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    grid = [(bulk, 0.0, 0.6) for bulk in (0.18, 0.36, 0.6, 0.9, 1.8)] + [(0.4, 0.8, 0.4), (0.4, 2.0, 0.4)]
    for bulk, tail, training in [(0.1, 0.0, 0.1)] if options.quick else grid:
        for staleness in (0, 1, 2, 4) if tail else (0, 1, 2):
            if tail or not options.draw:
                found = run(staleness, bulk, tail, training, 6 if options.quick else options.steps, options.draw)
                row = {"bulk": bulk, "tail": tail, "T": training, "N": staleness} | found
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    print_result({"benchmark": "overlap", "versions": versions()})


if __name__ == "__main__":
    main()
