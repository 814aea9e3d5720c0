"""Reinforcement learning on a laptop, in minutes: `make quickstart`.

By default it trains SmolLM2-135M-Instruct, a real language model, on sums asked in English (sums.py), or to answer in two
sentences (`--task sentences`, sentences.py). With `--model tiny` it makes a small model and a dataset of the task of
noisy_sort.py, and warm-starts the model on demonstrations that are wrong on purpose; examples/grpo.py, rloo.py, ppo.py,
online_dpo.py, dpo.py, kto.py, sft.py, reward.py and their YAML files find their model and data in the folder of that run;
distillation.py finds its teacher in that of `--algorithm distillation`.
`--task tools` makes a small model, too, and trains it to call a calculator (calculator.py).

    python examples/quickstart.py [--algorithm rloo] [--task sentences|tools] [--model tiny] [--seed 1] [--steps 160]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calculator
import noisy_sort
import sentences
import sums
import torch
from datasets import Dataset
from get_smollm2 import DownloadError, get_smollm2
from show_run import draw_curve, show, show_accuracy, show_files
from transformers.utils.logging import disable_progress_bar

from lowpeak import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    PPOConfig,
    PPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

GENERATIONS = 8  # of each prompt
TINY_PROMPTS = 32  # a step
PREFERENCES = 200 * 64  # pairs for DPO and KTO here, and for examples/dpo.py, kto.py and reward.py
TASKS: Mapping[str, tuple[Any, Callable[..., list[float]]]] = {
    "sums": (sums, sums.last_number_is_right),
    "sentences": (sentences, sentences.number_of_sentences_is_right),
}
OUTPUT_DIR = "runs/quickstart"
DEFAULT_MODEL = {
    **dict.fromkeys(["grpo", "rloo"], "smollm2"),
    **dict.fromkeys(["ppo", "online-dpo", "distillation", "dpo", "kto"], "tiny"),
}
OFFLINE = {"dpo": "pairs", "kto": "completions"}  # algorithms that learn from preferences and generate nothing
TEACHER = {"max_steps": 450, "per_device_train_batch_size": 128}
DISTILLATION_STEPS = 60


@dataclass(frozen=True)
class TinyTask:
    """A task of the tiny model: `warm` are the settings of its supervised start."""

    module: Any
    reward: Callable[..., list[float]]
    steps: int
    warm: Mapping[str, Any]
    tools: Sequence[Callable[..., Any]] = ()


TINY_TASKS = {
    "sort": TinyTask(noisy_sort, noisy_sort.sorted_exactly, 160, {"max_steps": 32, "per_device_train_batch_size": 128}),
    "tools": TinyTask(
        calculator,
        calculator.sum_is_right,
        150,
        {
            "max_steps": calculator.WARM_STEPS,
            "per_device_train_batch_size": calculator.WARM_ROWS,
            "shuffle_dataset": False,
            "assistant_only_loss": True,
        },
        [calculator.add],
    ),
}


@dataclass(frozen=True)
class Lesson:
    """A model, what it learns, and the settings with which it learns that in minutes."""

    model: Any
    tokenizer: Any
    reward: Callable[..., list[float]]
    prompts: Dataset
    held_out: Dataset
    steps: int
    settings: Mapping[str, Any]
    folder: Path  # of the run
    next_command: str | None = None
    tools: Sequence[Callable[..., Any]] = ()


def main() -> None:
    """Make the lesson, measure, train, measure."""
    options = parse()
    if not sys.stderr.isatty():
        disable_progress_bar()
    start = time.perf_counter()
    lesson = make_lesson(options)
    trainer = (make_offline_trainer if options.algorithm in OFFLINE else make_trainer)(options, lesson)
    before = predict(trainer, lesson)
    show_accuracy("before", before)
    args = trainer.args
    print(
        f"2/3  {options.algorithm.upper()}: {args.max_steps} steps of {size_of_step(options.algorithm, args)}",
        flush=True,
    )
    trainer.train()
    trainer.save_model()
    print("3/3  the same held-out prompts again", flush=True)
    after = predict(trainer, lesson)
    show(lesson.held_out, before, after)
    draw_curve(trainer, before, after, Path(args.output_dir, "curve.png"))
    next_command = lesson.next_command if options.output_dir == OUTPUT_DIR else None  # whose files are in that folder
    show_files(args.output_dir, next_command, time.perf_counter() - start)


def parse() -> argparse.Namespace:
    """The few things that can be chosen."""
    parser = argparse.ArgumentParser(
        description="See GRPO, RLOO, PPO, Online DPO, a teacher, DPO or KTO teach a task to a small language model."
    )
    parser.add_argument("--algorithm", choices=list(DEFAULT_MODEL), default="grpo")
    parser.add_argument(
        "--model", choices=["smollm2", "tiny"], help="default: smollm2 for grpo and rloo, tiny for the others"
    )
    parser.add_argument("--task", choices=[*TASKS, "tools"], help="default: sums; tools is the tiny model's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=positive, help="default: those of the task")
    parser.add_argument("--output_dir", default=OUTPUT_DIR)
    options = parser.parse_args()
    options.model = options.model or ("tiny" if options.task == "tools" else DEFAULT_MODEL[options.algorithm])
    if options.algorithm in ("distillation", *OFFLINE) and (options.model, options.task) != ("tiny", None):
        parser.error(
            f"--algorithm {options.algorithm} learns the tiny model's sorting alone; leave --model and --task out"
        )
    if options.task in TASKS and options.model == "tiny":
        parser.error("--task: the tiny model has tasks of its own; leave --task out, or add --model smollm2")
    if options.task == "tools" and options.model == "smollm2":
        parser.error("--task tools: only the tiny model has this task; leave --model out")
    options.task = options.task or "sums"
    return options


def positive(text: str) -> int:
    """Return the number; it must be at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, must be at least 1")
    return int(text)


def make_lesson(options: argparse.Namespace) -> Lesson:
    """The lesson of the chosen model; that of the tiny one if the other cannot be downloaded."""
    if options.model == "smollm2":
        try:
            return make_smollm2_lesson(options)
        except DownloadError as error:
            print(
                f"{error}; a tiny model is trained to sort digits instead of TASK={options.task} (MODEL=tiny)",
                flush=True,
            )
    return make_tiny_lesson(options)


def make_smollm2_lesson(options: argparse.Namespace) -> Lesson:
    """SmolLM2 and the chosen task; with sums the files are those that examples/smollm2.yaml reads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("1/3  SmolLM2-135M-Instruct: loaded from the cache, or downloaded (93 MB)", flush=True)
    path = get_smollm2()
    task, reward = TASKS[options.task]
    folder = Path(options.output_dir, "smollm2" if task is sums else options.task)
    prompts, held_out = task.make_prompts(options.seed), task.make_held_out()
    write_rows(folder, {"prompts": prompts, "held_out": held_out})
    link = folder / path.name
    link.unlink(missing_ok=True)  # of an earlier run, perhaps with another cache
    link.symlink_to(path, target_is_directory=True)
    return Lesson(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(path),
        reward=reward,
        prompts=prompts,
        held_out=held_out,
        steps=task.STEPS,
        settings={
            "max_completion_length": task.MAX_COMPLETION_LENGTH,
            "per_device_train_batch_size": task.PROMPTS * GENERATIONS,
            "learning_rate": task.LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "num_generations_eval": 1,
            "logging_steps": 2,
            "eval_strategy": "no",
            "save_strategy": "no",
        },
        folder=folder / options.algorithm,
        next_command="grpo --config examples/smollm2.yaml --dry-run" if task is sums else None,
    )


def make_tiny_lesson(options: argparse.Namespace) -> Lesson:
    """A new model that has learned too little from demonstrations, most of them wrong; other examples open sort's files."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # for so small a model a second thread costs more than it gives
    name = "tools" if options.task == "tools" else "sort"
    next_name = options.algorithm if options.algorithm in ("distillation", *OFFLINE) else "grpo"
    task, seed = TINY_TASKS[name], options.seed
    folder = Path(options.output_dir, "" if name == "sort" else name)
    demonstrations = task.module.make_demonstrations(
        task.warm["max_steps"] * task.warm["per_device_train_batch_size"], seed
    )
    prompts = task.module.make_prompts(max(options.steps or 0, task.steps) * TINY_PROMPTS, seed)
    held_out = task.module.make_prompts(512, seed, held_out=True)
    files = {"demonstrations": demonstrations, "prompts": prompts, "held_out": held_out}
    if name == "sort":
        files["preferences"] = noisy_sort.make_preferences(PREFERENCES, seed)
    write_rows(folder, files)
    print(f"1/3  supervised start: {len(demonstrations)} demonstrations, most of them wrong on purpose", flush=True)
    tokenizer = task.module.make_tokenizer()
    model = imitate(task.module.make_model(seed), tokenizer, demonstrations, folder / "warm_start", seed, task.warm)
    settings = {
        "max_completion_length": task.module.MAX_COMPLETION_LENGTH,
        "per_device_train_batch_size": TINY_PROMPTS * GENERATIONS,
        "learning_rate": 5e-4,
        "warmup_steps": 10,
        "lr_scheduler_type": "linear",
        "gradient_checkpointing": False,
        "logging_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 40,
        "save_steps": 80,
        "save_total_limit": 2,
    }
    return Lesson(
        model=model,
        tokenizer=tokenizer,
        reward=task.reward,
        prompts=prompts,
        held_out=held_out,
        steps=task.steps,
        settings=settings,
        folder=folder / options.algorithm,
        next_command=f"{next_name} --config examples/{next_name}.yaml --dry-run" if name == "sort" else None,
        tools=task.tools,
    )


def write_rows(folder: Path, datasets: Mapping[str, Dataset]) -> None:
    """Write each dataset as a file of JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in datasets.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def imitate(model: Any, tokenizer: Any, rows: Dataset, folder: Path, seed: int, sizes: Mapping[str, Any]) -> Any:
    """The model after supervised training on demonstrations."""
    args = SFTConfig(
        output_dir=str(folder),
        learning_rate=1e-3,
        adam_beta2=0.98,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        save_strategy="no",
        seed=seed,
        **sizes,
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return trainer.model


def make_teacher(lesson: Lesson, seed: int) -> Any:
    """A larger model that has learned the tiny model's task from right demonstrations."""
    rows = noisy_sort.make_demonstrations(TEACHER["max_steps"] * TEACHER["per_device_train_batch_size"], seed, 0.0)
    print(f"     a teacher: {len(rows)} right demonstrations", flush=True)
    model, folder = noisy_sort.make_model(seed, hidden_size=160), lesson.folder / "teacher"
    return imitate(model, lesson.tokenizer, rows, folder, seed, TEACHER)


def make_trainer(options: argparse.Namespace, lesson: Lesson) -> Any:
    """Make the algorithm's trainer; Online DPO has a KL penalty besides, PPO a critic, distillation a teacher."""
    critic = {"num_iterations": 2, "value_learning_rate": 1e-2, "vf_coef": 0.5, "cliprange_value": None}
    config_class, trainer_class, more = {
        "grpo": (GRPOConfig, GRPOTrainer, {"beta": 0.0}),
        "rloo": (RLOOConfig, RLOOTrainer, {"beta": 0.0}),
        "ppo": (PPOConfig, PPOTrainer, {"beta": 0.0, **critic}),
        "online-dpo": (OnlineDPOConfig, OnlineDPOTrainer, {"beta": 0.1}),
        "distillation": (DistillationConfig, DistillationTrainer, {}),
    }[options.algorithm]
    settings = {"max_steps": options.steps or lesson.steps, "num_generations": GENERATIONS, **lesson.settings, **more}
    parts = {}
    if options.algorithm == "distillation":
        parts["teacher_model"] = make_teacher(lesson, options.seed)
        settings |= {"max_steps": options.steps or DISTILLATION_STEPS, "num_generations": 1}
        settings["per_device_train_batch_size"] = 128
    args = config_class(
        output_dir=str(lesson.folder),
        weight_decay=0.0,
        seed=options.seed,
        **settings,
    )
    return trainer_class(
        model=lesson.model,
        reward_funcs=lesson.reward,
        args=args,
        train_dataset=lesson.prompts,
        eval_dataset=lesson.held_out,
        processing_class=lesson.tokenizer,
        tools=lesson.tools,
        **parts,
    )


def make_offline_trainer(options: argparse.Namespace, lesson: Lesson) -> Any:
    """Make the trainer of DPO or KTO; KTO takes each pair as two labelled completions."""
    pairs = noisy_sort.make_preferences(PREFERENCES, options.seed)
    config_class, trainer_class, steps, more = {
        "dpo": (DPOConfig, DPOTrainer, 100, {"per_device_train_batch_size": 64, "loss_type": ["sigmoid", "sft"]}),
        "kto": (KTOConfig, KTOTrainer, 150, {"per_device_train_batch_size": 128}),
    }[options.algorithm]
    steps = options.steps or steps
    args = config_class(
        output_dir=str(lesson.folder),
        max_steps=steps,
        learning_rate=1e-3,
        beta=0.5,
        warmup_steps=10,
        weight_decay=0.0,
        gradient_checkpointing=False,
        logging_steps=min(10, steps),
        save_strategy="no",
        seed=options.seed,
        **more,
    )
    return trainer_class(model=lesson.model, args=args, train_dataset=pairs, processing_class=lesson.tokenizer)


def predict(trainer: Any, lesson: Lesson) -> Any:
    """Complete the held-out prompts and score them: GRPO's trainer does it for those that generate nothing."""
    if isinstance(trainer, DPOTrainer | KTOTrainer):
        args = GRPOConfig(
            output_dir=str(lesson.folder),
            num_generations=GENERATIONS,
            max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH,
            beta=0.0,
            gradient_checkpointing=False,
            seed=trainer.args.seed,
        )
        trainer = GRPOTrainer(trainer.model, lesson.reward, args, lesson.prompts, processing_class=lesson.tokenizer)
    return trainer.predict(lesson.held_out, metric_key_prefix="eval")


def size_of_step(algorithm: str, args: Any) -> str:
    """What a step has: `32 prompts x 8`, `64 pairs`."""
    rows = args.per_device_train_batch_size
    if algorithm in OFFLINE:
        return f"{rows} {OFFLINE[algorithm]}"
    return f"{rows // args.num_generations} prompts x {args.num_generations}"


if __name__ == "__main__":
    main()
