"""One side of a comparison: trains with lowpeak or with TRL from the same saved weights, and tells what it took.

Run apart: `python -m benchmarks.harness.side REQUEST`. Snapshots go to `folder/<step>`, for accuracy.py.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.harness.canned import can_peer, our_rollouts
from benchmarks.harness.process import resident_bytes
from benchmarks.harness.report import OURS, mean, print_result
from benchmarks.harness.task import NUM_PROMPTS, noisy_sort, trainer_settings


@dataclass(frozen=True)
class SideRequest:
    """What one side is to do. `start` holds the weights to train, `settings` are added to the learning task's.

    `canned` puts fixed completions in place of sampled ones, asked for in the data's order, and logs every step.
    """

    library: str
    algorithm: str
    seed: int
    steps: int
    start: str
    folder: str
    snapshots: tuple[int, ...] = ()
    canned: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


class Snapshots(TrainerCallback):
    """Saves the model after some of the steps."""

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder = folder
        self._steps = frozenset(steps)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Save where the step is one of them."""
        if state.global_step in self._steps:
            model.save_pretrained(self._folder / str(state.global_step))


def make_trainer(request: SideRequest) -> Any:
    """The trainer of either library: the two constructors take the same arguments."""
    package, name = importlib.import_module(request.library), request.algorithm.upper()
    settings = trainer_settings(request.algorithm, request.seed, request.steps, Path(request.folder))
    settings |= request.settings
    more: dict[str, Any] = {}
    if request.canned:
        settings |= {"shuffle_dataset": False, "logging_steps": 1}
        more = {"rollout_func": our_rollouts} if request.library == OURS else {}
    trainer = getattr(package, f"{name}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(request.start),
        reward_funcs=noisy_sort.sorted_exactly,
        args=getattr(package, f"{name}Config")(**settings),
        train_dataset=noisy_sort.make_prompts(request.steps * NUM_PROMPTS, request.seed),
        processing_class=AutoTokenizer.from_pretrained(request.start),
        callbacks=[Snapshots(Path(request.folder), request.snapshots)],
        **more,
    )
    if request.canned and request.library != OURS:
        can_peer(trainer, request.algorithm)
    return trainer


def run_side(request: SideRequest) -> dict[str, Any]:
    """Train, and tell CPU seconds and what was resident before."""
    trainer = make_trainer(request)
    resident = resident_bytes()
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    logs = step_logs(trainer.state.log_history)
    return {
        "cpu_seconds": round(seconds, 3),
        "start_rss_mb": None if resident is None else round(resident / 2**20, 1),
        "frac_reward_zero_std": round(mean([log["frac_reward_zero_std"] for log in logs]), 4),
        "loss": [log["loss"] for log in logs],
        "grad_norm": [log["grad_norm"] for log in logs],
    }


def step_logs(history: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The logs of training steps: TRL adds the metrics of the last few to its summary, which has no loss of its own."""
    return [log for log in history if "loss" in log and "frac_reward_zero_std" in log]


if __name__ == "__main__":
    print_result(run_side(SideRequest(**json.loads(sys.argv[1]))))
