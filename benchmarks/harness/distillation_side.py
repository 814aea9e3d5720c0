"""One side's steps of distillation on canned completions, measured: `python -m benchmarks.harness.distillation_side REQUEST`."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from benchmarks.harness import shapes
from benchmarks.harness.allocations import AllocatedMemory
from benchmarks.harness.clock import PhaseClock, watch_step
from benchmarks.harness.divergence_head import TILE_FUNCTIONS
from benchmarks.harness.preference_pairs import FIRST_STEP, PEER_ON_GPU, FirstStep, as_on_a_gpu
from benchmarks.harness.process import in_mb
from benchmarks.harness.report import OURS, PEER, print_result
from benchmarks.harness.stepping import trained

ROWS = 2  # completions of a micro-batch


@dataclass(frozen=True)
class DistillationRequest:
    """What one side is to do: the way by name, the completions of a step, and the shapes of student and teacher."""

    way: str
    completions: int
    prompt_length: int
    completion_length: int
    beta: float
    hidden: int
    layers: int
    teacher_hidden: int
    teacher_layers: int
    vocabulary: int
    steps: int
    folder: str
    options: dict[str, Any] = field(default_factory=dict)


def settings_of(request: DistillationRequest) -> dict[str, Any]:
    """The arguments of either library's trainer."""
    settings = {
        "output_dir": request.folder,
        "max_steps": request.steps,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": request.completions // ROWS,
        "max_completion_length": request.completion_length,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "beta": request.beta,
        "gradient_checkpointing": True,
        "bf16": False,
        "use_cpu": True,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }
    rows = ROWS * (request.prompt_length + request.completion_length)
    return {**settings, **({"micro_batch_tokens": rows} if request.way == OURS else {}), **request.options}


def completion_of(prompt_ids: Sequence[int], longest: int) -> list[int]:
    """A completion whose length follows from the prompt: exponential, with a mean of a quarter of the longest."""
    return shapes.countdown(shapes.draw_lengths(1, random.Random(sum(prompt_ids)).randrange(1 << 30), longest)[0])


def make_trainer(request: DistillationRequest, memory: list[AllocatedMemory]) -> Any:
    """The trainer of either library, on equal weights and completions; `memory` begins after the weights."""
    library = OURS if request.way == OURS else PEER
    package = importlib.import_module(library)
    tokenizer, longest = shapes.make_tokenizer(request.vocabulary, knows_all=True), request.completion_length

    def our_rollouts(prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        completions = [completion_of(ids, longest) for ids in prompt_ids]
        logprobs = [[0.0] * len(row) for row in completions]  # nothing reads them
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    policy = shapes.make_model(request.hidden, request.layers, request.vocabulary)
    teacher = shapes.make_model(request.teacher_hidden, request.teacher_layers, request.vocabulary)
    prompts = shapes.make_prompts(request.steps * request.completions, request.prompt_length)
    memory.append(AllocatedMemory())
    trainer = package.DistillationTrainer(
        model=policy,
        teacher_model=teacher,
        args=package.DistillationConfig(**settings_of(request)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[FirstStep(memory[0])],
        **({"rollout_func": our_rollouts} if library == OURS else {}),
    )
    if library == PEER:
        trainer._generate_single_turn = lambda prompt_ids, *_: [completion_of(ids, longest) for ids in prompt_ids]
    return trainer


def measure_steps(request: DistillationRequest) -> dict[str, Any]:
    """Train, and tell what each step took, the first one's memory, and what was computed."""
    memory: list[AllocatedMemory] = []
    trainer, clock = make_trainer(request, memory), PhaseClock()
    if request.way == OURS:
        watch_step(trainer, OURS, clock)
    else:
        clock.watch(trainer, "training_step", "train")
    blocks = as_on_a_gpu("chunked_divergence", TILE_FUNCTIONS, "distillation_trainer")
    with blocks if request.way == PEER_ON_GPU else nullcontext():
        found = trained(trainer, clock, OURS if request.way == OURS else PEER, request.folder, [])
    return {**found, "step_mb": in_mb(memory[0].peaks()[FIRST_STEP])}


if __name__ == "__main__":
    print_result(measure_steps(DistillationRequest(**json.loads(sys.argv[1]))))
