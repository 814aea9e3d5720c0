"""Accuracy of a distilled student by divergence: `python -m benchmarks.distillation_curves [--quick] [--seeds 0 1 2]`.

Noisy sort. For each seed: a student of half a million parameters after a warm start that is too short, and a teacher of
0.8M after 450 steps of right demonstrations. Each objective trains a copy of the student for 60 steps of 128 completions,
AdamW 2e-3, 10 steps of warm-up, linear. Then a policy teaches itself from hints (5e-4), without another teacher. Held-out
accuracy without hints, sampled / greedy, by transformers' `generate()`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.harness.accuracy import measure
from benchmarks.harness.report import print_result, versions
from benchmarks.harness.task import HELD_OUT_SEED, WARM_ROWS, noisy_sort, warm_start
from lowpeak import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "reverse KL": {"beta": 1.0},
    "JSD 0.5": {"beta": 0.5},
    "forward KL": {"beta": 0.0},
    "sampled reverse KL": {"distillation_mode": "sampled_token"},
}
# The teacher is the policy as it was, which reads the answer before the prompt.
ITSELF: Mapping[str, Any] = {
    "beta": 1.0,
    "learning_rate": 5e-4,
    "teacher_model_kind": "base",
    "teacher_prompt_template": "{privileged_context}={prompt}",
}
ROWS = 128  # of a step
HINT_STEPS, DEMONSTRATION_STEPS, WRONG = 96, 8, 0.93  # of a start that reads hints; the share of wrong demonstrations
SHARED: dict[str, Any] = {
    "use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "weight_decay": 0.0,
    "gradient_checkpointing": False, "per_device_train_batch_size": ROWS,
}  # fmt: skip


class Accuracies(TrainerCallback):
    """Measures the policy after each `every` steps."""

    def __init__(self, measured: Callable[[Any], dict[str, float]], every: int) -> None:
        self.found: dict[int, dict[str, float]] = {}
        self._measured, self._every = measured, every

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step % self._every == 0:
            model.eval()
            self.found[state.global_step] = self._measured(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two steps of one seed: whether it runs at all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    found = parser.parse_args(sys.argv[1:])
    sizes = {"steps": 2, "teacher_steps": 2, "held_out": 8} if found.quick else {}
    with tempfile.TemporaryDirectory() as folder:
        seeds = found.seeds[:1] if found.quick else found.seeds
        runs = {seed: run_seed(seed, Path(folder, str(seed)), **sizes) for seed in seeds}
    print_result({"benchmark": "distillation_curves", "runs": runs, "versions": versions()})


def run_seed(seed: int, folder: Path, steps: int = 60, teacher_steps: int = 450, held_out: int = 1024) -> Any:
    """Accuracies of the teacher, of the start, and of each objective's student by step."""
    tokenizer = noisy_sort.make_tokenizer()
    prompts = noisy_sort.draw_prompts(held_out, HELD_OUT_SEED, held_out=True)
    answers = [noisy_sort.answer_to(prompt) for prompt in prompts]

    def measured(model: Any) -> dict[str, float]:
        return measure(model, tokenizer, prompts, answers)

    warm_start(folder / "start", seed)
    teacher = train_teacher(seed, folder / "teacher", teacher_steps)
    curves = {
        "teacher": {0: measured(teacher)},
        "start": {0: measured(AutoModelForCausalLM.from_pretrained(folder / "start").eval())},
    }
    for name, objective in OBJECTIVES.items():
        rows = noisy_sort.make_prompts(steps * ROWS, seed)
        config = distillation_config(folder / name, seed, steps, {"learning_rate": 2e-3, **objective})
        curves[name] = train(config, str(folder / "start"), rows, measured, teacher_model=teacher)
        show(seed, name, [*curves["teacher"].values(), *curves["start"].values(), *curves[name].values()])
    start = hinted_start(folder / "hints", seed, min(HINT_STEPS, 2 * teacher_steps))
    curves["start that reads hints"] = {0: measured(start.eval())}
    rows = with_hints(noisy_sort.make_prompts(steps * ROWS, seed))
    curves["itself"] = train(distillation_config(folder / "itself", seed, steps, ITSELF), start, rows, measured)
    show(seed, "itself", [*curves["start that reads hints"].values(), *curves["itself"].values()])
    return curves


def distillation_config(folder: Path, seed: int, steps: int, objective: Mapping[str, Any]) -> DistillationConfig:
    return DistillationConfig(
        str(folder), max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH,
        warmup_steps=min(10, steps // 2), lr_scheduler_type="linear", max_steps=steps, seed=seed, **SHARED, **objective,
    )  # fmt: skip


def train(config: DistillationConfig, model: Any, rows: Dataset, measured: Callable[[Any], Any], **parts: Any) -> Any:
    """Return the accuracies of a student after half and after all of its steps."""
    accuracies = Accuracies(measured, config.max_steps // 2)
    tokenizer = noisy_sort.make_tokenizer()
    DistillationTrainer(
        model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[accuracies], **parts
    ).train()
    return accuracies.found


def hinted_start(folder: Path, seed: int, hint_steps: int = HINT_STEPS) -> Any:
    """Return a model that copies a hint before its prompt, and that sorts badly without one."""
    draw = random.Random(seed)
    prompts = noisy_sort.draw_prompts(hint_steps * ROWS, 51 + seed)
    hints = ["".join(draw.choices("0123456789", k=noisy_sort.NUM_DIGITS)) for _ in prompts]
    pairs = zip(hints, prompts, strict=True)
    copies = Dataset.from_dict({"prompt": [f"{hint}={prompt}" for hint, prompt in pairs], "completion": hints})
    demonstrations = noisy_sort.make_demonstrations(DEMONSTRATION_STEPS * ROWS, seed, WRONG)
    rows = concatenate_datasets([demonstrations, copies]).shuffle(seed=seed)
    steps = len(rows) // ROWS
    args = SFTConfig(str(folder), learning_rate=1e-3, adam_beta2=0.98, max_steps=steps, seed=seed, **SHARED)
    tokenizer = noisy_sort.make_tokenizer()
    trainer = SFTTrainer(noisy_sort.make_model(seed), args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return trainer.model


def with_hints(rows: Dataset) -> Dataset:
    return rows.add_column("privileged_context", rows["answer"])


def train_teacher(seed: int, folder: Path, steps: int) -> Any:
    """Return a larger model that has learned the task from right demonstrations."""
    rows = noisy_sort.make_demonstrations(steps * WARM_ROWS, seed, 0.0)
    args = SFTConfig(
        str(folder), learning_rate=1e-3, adam_beta2=0.98, lr_scheduler_type="constant", max_steps=steps, seed=seed, **SHARED
    )  # fmt: skip
    model = noisy_sort.make_model(seed, hidden_size=160)
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=noisy_sort.make_tokenizer())
    trainer.train()
    return trainer.model.eval()


def show(seed: int, name: str, measured: Sequence[Mapping[str, float]]) -> None:
    """Print one row: the start, and this objective's steps, sampled / greedy in %."""
    cells = [f"{100 * each['sampled']:.0f} / {100 * each['greedy']:.0f}" for each in measured]
    print(f"| {seed} | {name} | {' | '.join(cells)} |", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
