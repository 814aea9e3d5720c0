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
from types import SimpleNamespace
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
    command: bool = False  # train by the library's command, from a YAML file with TRL's names
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
    by_name = "model_init_kwargs" in settings  # which act on a model by name
    trainer = getattr(package, f"{name}Trainer")(
        model=request.start if by_name else AutoModelForCausalLM.from_pretrained(request.start),
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


def train_by_command(request: SideRequest) -> Any:
    """The trainer after `lowpeak grpo` or `trl grpo` of one YAML file, on fixed completions."""
    package: Any = importlib.import_module(request.library)
    folder = Path(request.folder)
    made: list[Any] = []

    class CannedTrainer(package.GRPOTrainer):
        def __init__(self, **given: Any) -> None:
            ours = {"rollout_func": our_rollouts} if request.library == OURS else {}
            super().__init__(**given, **ours, callbacks=[Snapshots(folder, request.snapshots)])
            if not ours:
                can_peer(self, request.algorithm)
            made.append(self)

    arguments = ["--config", str(write_yaml(request, folder))]
    if request.library == OURS:
        library = SimpleNamespace(GRPOConfig=package.GRPOConfig, GRPOTrainer=CannedTrainer)
        importlib.import_module("lowpeak.cli").run_training("grpo", arguments, library)
    else:
        package.GRPOTrainer = CannedTrainer
        script = importlib.import_module("trl.scripts.grpo")
        script.main(*script.make_parser().parse_args_and_config(arguments))
    return made[0]


def write_yaml(request: SideRequest, folder: Path) -> Path:
    """A YAML file of TRL's command (JSON is YAML), beside a folder with the prompts."""
    noisy_sort.make_prompts(request.steps * NUM_PROMPTS, request.seed).to_json(folder / "data" / "train.jsonl")
    settings = trainer_settings(request.algorithm, request.seed, request.steps, folder / "out")
    command = {
        "model_name_or_path": request.start,
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "dataset_name": str(folder / "data"),
        "dataset_train_split": "train",
        "reward_funcs": ["noisy_sort.sorted_exactly"],
        "shuffle_dataset": False,
        "logging_steps": 1,
    }
    (folder / "trl.yaml").write_text(json.dumps({**settings, **request.settings, **command}))
    return folder / "trl.yaml"


def run_side(request: SideRequest) -> dict[str, Any]:
    """Train, and tell CPU seconds and what was resident before."""
    if request.command:
        return _losses(train_by_command(request))
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
        **_losses(trainer),
    }


def _losses(trainer: Any) -> dict[str, list[float]]:
    logs = step_logs(trainer.state.log_history)
    return {name: [log[name] for log in logs] for name in ("loss", "grad_norm")}


def step_logs(history: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The logs of training steps: TRL adds the metrics of the last few to its summary, which has no loss of its own."""
    return [log for log in history if "loss" in log and "frac_reward_zero_std" in log]


if __name__ == "__main__":
    print_result(run_side(SideRequest(**json.loads(sys.argv[1]))))
