"""One side of benchmarks.real_model: trains SmolLM2 with lowpeak or TRL and notes time and reward of each step.

Run apart: `python -m benchmarks.harness.real_side REQUEST`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.harness.report import print_result
from benchmarks.harness.task import load_example

GENERATIONS = 8
REWARDS = {"sums": "last_number_is_right", "sentences": "number_of_sentences_is_right"}  # by task, in its example


@dataclass(frozen=True)
class RealRequest:
    """What one side is to do: `kind` is fp32, bf16 (autocast), lora (fp32), or uncheckpointed.

    The first three recompute activations, as both libraries do by default; the last is fp32 without that.
    """

    library: str
    kind: str
    seed: int
    steps: int
    model: str
    folder: str
    held_out: int  # questions
    task: str = "sums"


class Clock(TrainerCallback):
    """Notes CPU and wall-clock seconds since the start of training at the end of each step."""

    def __init__(self) -> None:
        self.cpu_seconds: list[float] = []
        self.seconds: list[float] = []
        self._start = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start both clocks."""
        self._start = time.process_time(), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note both clocks."""
        self.cpu_seconds.append(round(time.process_time() - self._start[0], 2))
        self.seconds.append(round(time.perf_counter() - self._start[1], 2))


def run_side(request: RealRequest) -> dict[str, Any]:
    """Train, and measure the held-out accuracy before and after with transformers' generate()."""
    task, package = load_example(request.task), importlib.import_module(request.library)
    reward = getattr(task, REWARDS[request.task])
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    model = AutoModelForCausalLM.from_pretrained(request.model, dtype=torch.float32)
    events = [(time.monotonic(), "before")]
    before = held_out_accuracy(model, tokenizer, task, reward, request.held_out)
    more: dict[str, Any] = {}
    if request.kind == "lora":
        from peft import LoraConfig

        more = {"peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")}
    clock = Clock()
    args = package.GRPOConfig(
        output_dir=str(Path(request.folder, f"{request.library}-{request.kind}-{request.seed}")),
        max_steps=request.steps,
        per_device_train_batch_size=task.PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=task.MAX_COMPLETION_LENGTH,
        learning_rate=2e-4 if request.kind == "lora" else task.LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=request.kind == "bf16",
        gradient_checkpointing=request.kind != "uncheckpointed",
        use_cpu=True,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=request.seed,
    )
    trainer = package.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=task.make_prompts(request.seed),
        processing_class=tokenizer,
        callbacks=[clock],
        **more,
    )
    events.append((time.monotonic(), "training"))
    trainer.train()
    events.append((time.monotonic(), "after"))
    logs = [log for log in trainer.state.log_history if "reward" in log and "completions/mean_length" in log]
    return {
        "accuracy": [before, held_out_accuracy(trainer.model, tokenizer, task, reward, request.held_out)],
        "rewards": [round(log["reward"], 4) for log in logs][: request.steps],
        "lengths": [round(log["completions/mean_length"], 2) for log in logs][: request.steps],
        "cpu_seconds": clock.cpu_seconds,
        "seconds": clock.seconds,
        "events": events,
    }


def held_out_accuracy(model: Any, tokenizer: Any, task: Any, reward: Any, count: int) -> float:
    """The share of held-out questions that are answered rightly, decoded greedily."""
    rows = task.make_held_out().take(count)
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in rows["prompt"]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    was_training = model.training
    with torch.no_grad():
        made = model.eval().generate(
            **inputs, max_new_tokens=task.MAX_COMPLETION_LENGTH, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    model.train(was_training)
    answers = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = reward([[{"content": text}] for text in answers], rows["answer"])
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    print_result(run_side(RealRequest(**json.loads(sys.argv[1]))))
