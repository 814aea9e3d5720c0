"""Reinforcement learning on a laptop, in minutes: `make quickstart`.

It makes a small model and a dataset of the task of noisy_sort.py, warm-starts the model on demonstrations that are
wrong on purpose, and trains it with GRPO (or RLOO, PPO, or Online DPO) until it sorts. Everything is written below runs/quickstart,
where examples/grpo.py, rloo.py, ppo.py, online_dpo.py, sft.py, reward.py and their YAML files find their model and data.

    python examples/quickstart.py [--algorithm rloo] [--seed 1] [--output_dir runs/quickstart] [--steps 160]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import noisy_sort
import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from lowpeak import (
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    PPOConfig,
    PPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowpeak.report import write_report

WARM_STEPS = 32
WARM_ROWS = 128  # a step, each row seen once
RL_PROMPTS = 32  # a step
GENERATIONS = 8  # of each prompt
HELD_OUT = 512
PREFERENCES = 120 * 64  # what examples/reward.py trains a reward model on
SHOWN = 8


def main() -> None:
    """Make, warm-start, measure, train, measure."""
    options = parse()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # for so small a model a second thread costs more than it gives
    if not sys.stderr.isatty():
        disable_progress_bar()
    folder = Path(options.output_dir)
    start = time.perf_counter()
    data = make_data(folder, options.seed, options.steps)
    print(
        f"1/3  supervised start: {len(data.demonstrations)} demonstrations, most of them wrong on purpose", flush=True
    )
    model, tokenizer = warm_start(folder, data.demonstrations, options.seed)
    trainer = make_trainer(options, model, tokenizer, data)
    before = trainer.predict(data.held_out, metric_key_prefix="eval")
    show_accuracy("before", before)
    print(
        f"2/3  {options.algorithm.upper()}: {options.steps} steps of {RL_PROMPTS} prompts x {GENERATIONS}", flush=True
    )
    trainer.train()
    trainer.save_model()
    print("3/3  the same held-out prompts again", flush=True)
    after = trainer.predict(data.held_out, metric_key_prefix="eval")
    show(before, after, trainer.args.output_dir, time.perf_counter() - start)


def parse() -> argparse.Namespace:
    """The few things that can be chosen."""
    parser = argparse.ArgumentParser(
        description="See GRPO, RLOO, PPO or Online DPO learn a small task on a small model."
    )
    parser.add_argument("--algorithm", choices=["grpo", "rloo", "ppo", "online-dpo"], default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--output_dir", default="runs/quickstart")
    return parser.parse_args()


@dataclass(frozen=True)
class Data:
    """What the model is started with, trained on and judged on, and what a reward model learns from."""

    demonstrations: Dataset
    prompts: Dataset
    held_out: Dataset
    preferences: Dataset


def make_data(folder: Path, seed: int, steps: int) -> Data:
    """The datasets, as files that the other examples open."""
    folder.mkdir(parents=True, exist_ok=True)
    data = Data(
        demonstrations=noisy_sort.make_demonstrations(WARM_STEPS * WARM_ROWS, seed),
        prompts=noisy_sort.make_prompts(max(steps, 160) * RL_PROMPTS, seed),
        held_out=noisy_sort.make_prompts(HELD_OUT, seed, held_out=True),
        preferences=noisy_sort.make_preferences(PREFERENCES, seed),
    )
    for name, rows in vars(data).items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return data


def warm_start(folder: Path, demonstrations: Dataset, seed: int) -> tuple[Any, Any]:
    """A new model, and its tokenizer, after too little supervised training on mostly wrong answers."""
    tokenizer = noisy_sort.make_tokenizer()
    model = noisy_sort.make_model(seed)
    args = SFTConfig(
        output_dir=str(folder / "warm_start"),
        max_steps=WARM_STEPS,
        per_device_train_batch_size=WARM_ROWS,
        learning_rate=1e-3,
        adam_beta2=0.98,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=not sys.stderr.isatty(),
        seed=seed,
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=demonstrations, processing_class=tokenizer)
    log_shortly(trainer)
    trainer.train()
    trainer.save_model()
    return trainer.model, tokenizer


def make_trainer(options: argparse.Namespace, model: Any, tokenizer: Any, data: Data) -> Any:
    """Any of them with the same settings, but that Online DPO holds to a reference, and PPO has a critic to teach."""
    critic = {"num_iterations": 2, "value_learning_rate": 1e-2, "vf_coef": 0.5, "cliprange_value": None}
    config_class, trainer_class, more = {
        "grpo": (GRPOConfig, GRPOTrainer, {"beta": 0.0}),
        "rloo": (RLOOConfig, RLOOTrainer, {"beta": 0.0}),
        "ppo": (PPOConfig, PPOTrainer, {"beta": 0.0, **critic}),
        "online-dpo": (OnlineDPOConfig, OnlineDPOTrainer, {"beta": 0.1}),
    }[options.algorithm]
    args = config_class(
        output_dir=f"{options.output_dir}/{options.algorithm}",
        max_steps=options.steps,
        per_device_train_batch_size=RL_PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH,
        learning_rate=5e-4,
        warmup_steps=10,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        gradient_checkpointing=False,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=40,
        save_steps=80,
        save_total_limit=2,
        disable_tqdm=not sys.stderr.isatty(),
        seed=options.seed,
        **more,
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=noisy_sort.sorted_exactly,
        args=args,
        train_dataset=data.prompts,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
    )
    log_shortly(trainer)
    return trainer


def log_shortly(trainer: Any) -> None:
    """Print a line of a few numbers in place of a dictionary of forty."""
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(ShortProgress())
    else:
        trainer.add_callback(ShortLines())


class ShortLines(TrainerCallback):
    """Prints a line for each logged step and each evaluation."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        """One line of what a person watches."""
        line = short_line(state.global_step, logs or {})
        if line:
            self.write(line)

    def write(self, line: str) -> None:
        """Print the line now, also where the output is not a terminal."""
        print(line, flush=True)


class ShortProgress(ShortLines, ProgressCallback):
    """The same lines above the progress bar, which says what the trainer is doing: generating, scoring, training."""

    def write(self, line: str) -> None:
        """Print the line above the bar."""
        if self.training_bar is not None:
            self.training_bar.write(line)


def short_line(step: int, logs: dict[str, float]) -> str:
    """`step 40  reward 0.31`, or the held-out accuracy, or nothing for logs of another kind."""
    start = f"     step {step:4d}  "
    if "eval_accuracy" in logs:
        return f"{start}held out: greedy {logs['eval_greedy_accuracy']:.2f}, sampled {logs['eval_accuracy']:.2f}"
    if "reward" in logs:
        return f"{start}reward {logs['reward']:.2f}"
    return f"{start}loss {logs['loss']:.2f}" if "loss" in logs else ""


def show_accuracy(when: str, prediction: Any) -> None:
    """Both accuracies on the held-out prompts, in one line."""
    greedy, sampled = prediction.metrics["eval_greedy_accuracy"], prediction.metrics["eval_accuracy"]
    print(
        f"     {when:6s}  accuracy on {HELD_OUT} held-out prompts: greedy {greedy:.2f}, sampled {sampled:.2f}",
        flush=True,
    )


def show(before: Any, after: Any, output_dir: str, seconds: float) -> None:
    """Accuracy and a few completions before and after, and where the files are."""
    print(f"\n{'prompt':10s}{'right':10s}{'before':16s}{'after':16s}   (sampled)")
    for old, new in zip(sampled_rows(before), sampled_rows(after), strict=True):
        right = noisy_sort.answer_to(str(old["prompt"]))
        print(f"{old['prompt']:10s}{right:10s}{marked(old, right):16s}{marked(new, right):16s}")
    print()
    show_accuracy("before", before)
    show_accuracy("after", after)
    print(f"\n{seconds:.0f} seconds in all. The run's files are in {output_dir}: the trained model, checkpoints, and")
    print("journal/ with one line per step (steps.jsonl) and per completion (rollouts.jsonl) for pandas or polars.")
    print(f"Curves and completions, in a browser: {write_report([Path(output_dir)])}")
    command = Path(sys.executable).with_name("lowpeak")
    here = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else "lowpeak"
    print(f"Next: {here} grpo --config examples/grpo.yaml --dry-run")


def sampled_rows(prediction: Any) -> list[dict[str, Any]]:
    """One sampled completion for each of a few prompts: the first of its group, whatever it is worth."""
    firsts: dict[Any, dict[str, Any]] = {}
    for row in prediction.predictions:
        if row["decoding"] == "sampled":
            firsts.setdefault(row["group"], row)
    return [firsts[group] for group in random.Random(0).sample(sorted(firsts), SHOWN)]


def marked(row: dict[str, Any], right: str) -> str:
    """The completion with a tick or a cross."""
    return f"{row['completion']} {'ok' if row['completion'] == right else 'wrong'}"


if __name__ == "__main__":
    main()
