"""Runs that rows make: a GRPO trainer on a small model, and pairs of runs that must have the same weights."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.trainer_callback import TrainerCallback

from lowpeak.selftest.models import make_model, make_prompts, make_tokenizer, mib
from lowpeak.selftest.table import Bench, require
from lowpeak.trainers import GRPOConfig, GRPOTrainer

ROLLOUTS = {"num_generations": 8, "max_completion_length": 7, "kv_cache_bytes": 1 << 26}


def make_trainer(
    bench: Bench, name: str, model: Any, reward: Any, *, peft_config: Any = None, callbacks: Any = None, **changes: Any
) -> GRPOTrainer:
    """Return a trainer that writes to the folder `name`; `changes` are arguments of its GRPOConfig."""
    settings = {
        "output_dir": str(bench.folder / name),
        "use_cpu": not bench.on_gpu,
        "per_device_train_batch_size": 32,
        "learning_rate": 5e-4,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = GRPOConfig(**{**settings, **ROLLOUTS, **changes})
    data = Dataset.from_list(make_prompts(256))
    tokenizer = make_tokenizer(model.config.vocab_size)
    more = {"processing_class": tokenizer, "peft_config": peft_config, "callbacks": callbacks}
    return GRPOTrainer(model, reward, args, data, **more)


class _Run(TrainerCallback):
    """A short GRPO run: its final weights, the distance they moved, and the device's memory.

    `generating_bytes` are allocated after generation, `reserved_bytes` are those of torch's allocator after a backward.
    """

    def __init__(self, bench: Bench, name: str, resume: str | None = None, **changes: Any) -> None:
        gc.collect()  # frees the memory of an earlier run
        self._device, self.generating_bytes, self.reserved_bytes = bench.device, 0, 0
        self._before = self._device_bytes()
        model = make_model(*bench.pick((32_000, 512, 8, (8, 2)), (13, 32, 2, (4, 2))))
        started = _flat(model)
        trainer = make_trainer(bench, name, model, self._reward, callbacks=[self], padding_free=False, **changes)
        # The other backends add the gradients of padded rows with atomics, in another order in each run.
        with sdpa_kernel(SDPBackend.MATH):
            trainer.train(resume_from_checkpoint=resume)
        self.weights = _flat(trainer.model)
        self.moved = float((self.weights - started).norm())
        line = next(line for line in reversed(trainer.state.log_history) if "loss" in line)
        self.numbers = {
            "step_seconds": line["step_time"],
            "train_peak_bytes": line["peak_memory/train"],
            "train_reserved_bytes": self.reserved_bytes,
            "generating_bytes": self.generating_bytes,
        }
        reserved = f" ({mib(self.reserved_bytes)} reserved)" if self.reserved_bytes else ""
        self.cost = f"{line['step_time']:.2f} s and {mib(line['peak_memory/train'])}{reserved} per step"

    def distance(self, other: _Run) -> float:
        """Return the distance to another run's weights, relative to the distance that these moved."""
        return float((other.weights - self.weights).norm()) / self.moved

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the memory that the allocator holds: it returns none between a backward and here."""
        if self._device.type == "cuda":
            self.reserved_bytes = max(self.reserved_bytes, torch.cuda.memory_reserved(self._device))

    def _reward(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """Return rewards computed from token ids, so that they differ within a group."""
        self.generating_bytes = self._device_bytes() - self._before
        return [float(sum(ids) % 5) for ids in completion_ids]

    def _device_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])


def same_run(bench: Bench, changes: Mapping[str, Any], tolerance: float = 0.0, **settings: Any) -> str:
    """Compare a run with `settings` and `changes` with two equal runs without `changes`.

    MismatchError if its weights differ by more than `tolerance` of their movement, and more than ten times as much as those of
    the equal runs. The tolerance is 0 if `changes` leave the operations and their order.
    """

    def run(name: str, **more: Any) -> _Run:
        return _Run(bench, name, **{"max_steps": 3, **settings, **more})

    plain, again, changed = run("plain"), run("again"), run("changed", **changes)
    noise, difference = plain.distance(again), plain.distance(changed)
    bench.record(difference=difference, difference_of_equal_runs=noise, changed=changed.numbers, plain=plain.numbers)
    require(
        difference <= max(tolerance, 10 * noise),
        f"weights differ by {difference:.1e} of their movement, but equal runs by {noise:.1e}",
    )
    result = (
        "the same bits"
        if difference == 0
        else f"weights differ by {difference:.0e} of their movement (equal runs by {noise:.0e})"
    )
    return (
        f"{result}; {changed.cost}, {mib(changed.generating_bytes)} on the device after a rollout "
        f"(without: {plain.cost}, {mib(plain.generating_bytes)})"
    )
