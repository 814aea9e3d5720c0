"""Steps of PPO with one layout of its critic, or of GRPO, on W2: `python -m benchmarks.harness.critics REQUEST`.

Completions are canned countdowns, so that every layout trains the same rows; each rollout serves one step, without a
reference. PPO scores old log-probs and values before it, GRPO nothing.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback

import lowpeak
from benchmarks.harness import shapes
from benchmarks.harness.clock import PhaseClock, watch_step
from benchmarks.harness.process import in_mb, resident_bytes
from benchmarks.harness.report import OURS, print_result
from benchmarks.harness.stepping import Stamps, difference, our_countdowns, own_numbers, spread

LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


@dataclass(frozen=True)
class CriticRequest:
    """What one process is to do: `critic` is None for GRPO; `lengths` are those of each step's completions."""

    critic: str | None
    lora: bool
    num_prompts: int
    prompt_length: int
    steps: int
    threads: int
    start: str
    folder: str
    lengths: list[list[int]]
    options: dict[str, Any] = field(default_factory=dict)


class Wall(TrainerCallback):
    """The clock on the wall when each step ends."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the time."""
        self.seen.append(time.perf_counter())


def settings_of(request: CriticRequest) -> dict[str, Any]:
    """The arguments of either trainer: a rollout serves one step."""
    settings = {
        "output_dir": request.folder,
        "max_steps": request.steps,
        "per_device_train_batch_size": shapes.NUM_GENERATIONS,
        "gradient_accumulation_steps": request.num_prompts,
        "num_generations": shapes.NUM_GENERATIONS,
        "num_iterations": 1,
        "max_completion_length": shapes.LONGEST,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": True,
        "shuffle_dataset": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }
    return {**settings, **({} if request.critic is None else {"critic": request.critic}), **request.options}


def make_trainer(request: CriticRequest) -> Any:
    """GRPO's trainer, or PPO's with the critic that is asked for; the policy is read by name, as users do."""
    trainer, config = (lowpeak.GRPOTrainer, lowpeak.GRPOConfig)
    if request.critic is not None:
        trainer, config = (lowpeak.PPOTrainer, lowpeak.PPOConfig)
    given = iter(request.lengths)
    prompts = shapes.make_prompts(request.steps * request.num_prompts, request.prompt_length)
    return trainer(
        model=request.start,
        reward_funcs=spread([]),
        args=config(**settings_of(request)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(request.start),
        rollout_func=lambda prompts, trainer: our_countdowns(prompts, trainer, given),
        peft_config=adapter() if request.lora else None,
    )


def adapter() -> Any:
    """A LoRA adapter on every linear layer but the head."""
    from peft import LoraConfig

    return LoraConfig(**LORA)


def planned_steps(request: CriticRequest) -> dict[str, Any]:
    """Train, and tell what each step took, what was resident before, and how many values are trained."""
    torch.set_num_threads(request.threads)
    before = resident_bytes()
    trainer, clock, wall = make_trainer(request), PhaseClock(), Wall()
    watch_step(trainer, OURS, clock)
    stamps = Stamps(clock)
    trainer.add_callback(stamps)
    trainer.add_callback(wall)
    for parameter in trainer.model.parameters():
        parameter.detach().sum()  # weights of a file are resident once they are read, and not before
    gc.collect()
    resident = resident_bytes()
    stamps.seen.append({"total": time.process_time()})
    wall.seen.append(time.perf_counter())
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log and "grad_norm" in log]
    return {
        "steps": [difference(*pair) for pair in zip(stamps.seen[:-1], stamps.seen[1:], strict=True)],
        "wall": [round(after - at, 3) for at, after in zip(wall.seen[:-1], wall.seen[1:], strict=True)],
        "events": clock.events,
        "empty_rss_mb": None if before is None else in_mb(before),
        "start_rss_mb": None if resident is None else in_mb(resident),
        "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "loss": [log["loss"] for log in logs],
        "own": own_numbers(trainer, Path(request.folder)),
    }


if __name__ == "__main__":
    print_result(planned_steps(CriticRequest(**json.loads(sys.argv[1]))))
