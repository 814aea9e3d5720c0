"""Accuracy of a distilled student by divergence: `python -m benchmarks.distillation_curves [--quick] [--seeds 0 1 2]`.

Noisy sort. For each seed: a student of half a million parameters after a warm start that is too short, and a teacher of
0.8M after 450 steps of right demonstrations. Each objective trains a copy of the student for 60 steps of 128 completions,
AdamW 5e-4, 10 steps of warm-up, linear. Held-out accuracy, sampled / greedy, by transformers' `generate()`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
ROWS = 128  # of a step
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
        accuracies = Accuracies(measured, steps // 2)
        args = DistillationConfig(
            str(folder / name), max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH, learning_rate=5e-4,
            warmup_steps=min(10, steps // 2), lr_scheduler_type="linear", max_steps=steps, seed=seed, **SHARED, **objective,
        )  # fmt: skip
        DistillationTrainer(
            str(folder / "start"),
            teacher_model=teacher,
            args=args,
            train_dataset=noisy_sort.make_prompts(steps * ROWS, seed),
            processing_class=tokenizer,
            callbacks=[accuracies],
        ).train()
        curves[name] = accuracies.found
        show(seed, name, curves)
    return curves


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


def show(seed: int, name: str, curves: Mapping[str, Mapping[int, Mapping[str, float]]]) -> None:
    """Print one row: teacher, start, and this objective's steps, sampled / greedy in %."""
    measured = [*curves["teacher"].values(), *curves["start"].values(), *curves[name].values()]
    cells = [f"{100 * each['sampled']:.0f} / {100 * each['greedy']:.0f}" for each in measured]
    print(f"| {seed} | {name} | {' | '.join(cells)} |", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
