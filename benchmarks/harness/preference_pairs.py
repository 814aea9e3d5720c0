"""One side's steps of DPO on pairs of a dataset, measured: `python -m benchmarks.harness.preference_pairs REQUEST`.

Memory is what torch's allocator has given out beside both models' weights, on either side: the tracker of one side resets
the process's high-water mark.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.harness import shapes
from benchmarks.harness.allocations import REST, AllocatedMemory
from benchmarks.harness.clock import PhaseClock, watch_step
from benchmarks.harness.divergence_head import in_blocks
from benchmarks.harness.process import in_mb
from benchmarks.harness.report import OURS, PEER, print_result
from benchmarks.harness.stepping import trained

PEER_ON_GPU = f"{PEER}, as on a GPU"
TILE_FUNCTIONS = ("_forward_tile", "_backward_tile")  # of TRL's module, in place of its Triton kernels
FIRST_STEP = "first step"


@dataclass(frozen=True)
class PairsRequest:
    """What one side is to do: the way by name, the pairs of a step, one a micro-batch, and the model's shape."""

    way: str
    pairs: int
    prompt_length: int
    completion_length: int
    hidden: int
    layers: int
    vocabulary: int
    steps: int
    folder: str
    options: dict[str, Any] = field(default_factory=dict)


class FirstStep(TrainerCallback):
    """Marks the first step up to the optimizer's."""

    def __init__(self, memory: AllocatedMemory) -> None:
        self._memory = memory

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._memory.begin("counted")
        self._memory.begin(FIRST_STEP)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._memory.begin(REST)


def settings_of(request: PairsRequest) -> dict[str, Any]:
    """The arguments of either library's trainer."""
    settings = {
        "output_dir": request.folder,
        "max_steps": request.steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": request.pairs,
        "max_length": request.prompt_length + request.completion_length,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "beta": 0.1,
        "gradient_checkpointing": True,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }
    one_pair = request.prompt_length + 2 * request.completion_length
    own: dict[str, Any] = {"train_sampling_strategy": "sequential"}
    if request.way == OURS:
        own = {"shuffle_dataset": False, "micro_batch_tokens": one_pair}
    return {**settings, **own, **request.options}


def make_data(request: PairsRequest) -> Dataset:
    """Pairs of random words, all of the same lengths; both libraries add a completion's end."""
    count = request.steps * request.pairs
    prompts = shapes.make_prompts(count, request.prompt_length)
    chosen, rejected = (
        [f" {text}" for text in shapes.make_prompts(count, request.completion_length - 1, seed)] for seed in (1, 2)
    )
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def make_trainer(request: PairsRequest, memory: list[AllocatedMemory]) -> Any:
    """The trainer of either library, with equal weights in policy and reference; `memory` begins after these."""
    package = importlib.import_module(OURS if request.way == OURS else PEER)
    policy, reference = (shapes.make_model(request.hidden, request.layers, request.vocabulary) for _ in range(2))
    memory.append(AllocatedMemory())
    return package.DPOTrainer(
        model=policy,
        ref_model=reference,
        args=package.DPOConfig(**settings_of(request)),
        train_dataset=make_data(request),
        processing_class=shapes.make_tokenizer(request.vocabulary),
        callbacks=[FirstStep(memory[0])],
    )


@contextmanager
def as_on_a_gpu(
    kernels: str = "chunked_logprob", functions: Sequence[str] = TILE_FUNCTIONS, caller: str = "utils"
) -> Iterator[None]:
    """TRL's fused LM head, which `caller` calls, on counted positions alone, its tiles' operations in blocks of rows."""
    module, trainer = (importlib.import_module(f"trl.{name}") for name in (f"kernels.{kernels}", f"trainer.{caller}"))
    by_blocks: dict[str, Any] = {name: in_blocks(getattr(module, name)) for name in functions}
    with mock.patch.multiple(module, **by_blocks), mock.patch.object(trainer, "_use_triton", return_value=True):
        yield


def watch(trainer: Any, way: str, clock: PhaseClock) -> None:
    """`score` (the reference's pass) and `train`."""
    if way == OURS:
        watch_step(trainer, OURS, clock)
        return
    clock.watch(trainer.ref_model, "forward", "score")
    clock.watch(trainer, "training_step", "train")


def measure_steps(request: PairsRequest) -> dict[str, Any]:
    """Train, and tell what each step took, the first one's memory, and what was computed."""
    memory: list[AllocatedMemory] = []
    trainer, clock = make_trainer(request, memory), PhaseClock()
    watch(trainer, request.way, clock)
    library = OURS if request.way == OURS else PEER
    with as_on_a_gpu() if request.way == PEER_ON_GPU else nullcontext():
        found = trained(trainer, clock, library, request.folder, [])
    return {**found, "step_mb": in_mb(memory[0].peaks()[FIRST_STEP])}


if __name__ == "__main__":
    print_result(measure_steps(PairsRequest(**json.loads(sys.argv[1]))))
