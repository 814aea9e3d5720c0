"""One GRPO step on very long canned completions, by phase: `python -m benchmarks.harness.long REQUEST`."""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import shapes
from benchmarks.harness.clock import PhaseClock, watch_step
from benchmarks.harness.process import in_mb, resident_bytes
from benchmarks.harness.report import OURS, print_result


@dataclass(frozen=True)
class LongRequest:
    """The model's shape, the completions' length and number, and whether activations are checkpointed."""

    hidden: int
    layers: int
    vocabulary: int
    length: int
    num_generations: int
    checkpointing: bool
    prompt_length: int = 64


def make_trainer(request: LongRequest, folder: str) -> Any:
    """A GRPO trainer whose rollout is random tokens, with a reward that differs within the group."""
    from datasets import Dataset

    from lowpeak import GRPOConfig, GRPOTrainer

    draw = random.Random(0)

    def rollout(prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
        completions = [draw.choices(range(2, request.vocabulary), k=request.length) for _ in ids]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[0.0] * request.length for _ in ids]}

    def spread(completions: Sequence[str], **columns: Any) -> list[float]:
        return [float(i) for i in range(len(completions))]

    args = GRPOConfig(
        output_dir=folder,
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=request.num_generations,
        num_generations=request.num_generations,
        max_completion_length=request.length,
        micro_batch_tokens=request.length + request.prompt_length,
        logprob_chunk_size=256,
        gradient_checkpointing=request.checkpointing,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    prompt = " ".join(["w400"] * request.prompt_length)
    model = shapes.make_model(request.hidden, request.layers, request.vocabulary)
    data = Dataset.from_list([{"prompt": prompt}])
    return GRPOTrainer(model, spread, args, data, processing_class=shapes.make_tokenizer(), rollout_func=rollout)


def run_step(request: LongRequest) -> dict[str, Any]:
    """CPU seconds by phase, and what was resident before the step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, clock = make_trainer(request, str(Path(folder) / "run")), PhaseClock()
        watch_step(trainer, OURS, clock)
        gc.collect()
        resident, start = resident_bytes(), time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        log = trainer.state.log_history[0]
    return {
        "seconds": {name: round(used, 2) for name, used in clock.seconds.items()} | {"total": round(seconds, 2)},
        "events": clock.events,
        "start_rss_mb": None if resident is None else in_mb(resident),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "grad_norm": log["grad_norm"],
    }


if __name__ == "__main__":
    print_result(run_step(LongRequest(**json.loads(sys.argv[1]))))
