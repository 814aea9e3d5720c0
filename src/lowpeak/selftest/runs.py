"""Tests of whole runs: one that learns, pairs that must be equal, and several ranks against one process."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor

from lowpeak.arguments import GRPOConfig
from lowpeak.selftest.models import even_share, make_model, make_prompts, make_tokenizer, mib
from lowpeak.selftest.table import Bench, require, row
from lowpeak.trainers import GRPOTrainer

_ROLLOUTS = {"num_generations": 8, "max_completion_length": 7, "kv_cache_bytes": 1 << 26}
# Relative to the distance that a run moves its weights: several ranks sum gradients in another order.
_RANKS_TOLERANCE = 0.02
_REWARD_GAIN = 0.2
_ENGINE_TOLERANCE = 0.05  # in nats, on average: sampling and training round differently


def _trainer(bench: Bench, name: str, model: Any, reward: Any, **changes: Any) -> GRPOTrainer:
    settings = {
        "output_dir": str(bench.folder / name),
        "use_cpu": bench.device.type == "cpu",
        "per_device_train_batch_size": 32,
        "learning_rate": 5e-4,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = GRPOConfig(**{**settings, **_ROLLOUTS, **changes})
    data = Dataset.from_list(make_prompts(256))
    return GRPOTrainer(model, reward, args, data, processing_class=make_tokenizer(model.config.vocab_size))


@row("GRPO learns", "a GPU", seconds=180)
def grpo_learns(bench: Bench, num_steps: int = 30) -> str:
    """Train a random model with shared prompts, in bf16 on a GPU, and compare its first reward with its last."""
    on_gpu = bench.device.type == "cuda"
    trainer = _trainer(bench, "learns", make_model(), even_share, max_steps=num_steps, bf16=on_gpu)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    drift = max(line.get("sampling/sampling_logp_difference/mean", 0.0) for line in trainer.state.log_history)
    choice = trainer.run.sizes.layout_choice
    numbers = (
        f"reward {rewards[0]:.2f} at first and {rewards[-1]:.2f} after {num_steps} steps, {seconds / num_steps:.2f} s per step, "
        f"the engine's log-probs within {drift:.0e} of the model's on average"
    )
    require(rewards[-1] >= rewards[0] + _REWARD_GAIN and drift <= _ENGINE_TOLERANCE, numbers)
    require(choice.layout == "shared", f"rows are padded: {choice.why}")
    return numbers


class _Run:
    """A short GRPO run: its final weights, the distance they moved, and the device's bytes during generation."""

    def __init__(self, bench: Bench, name: str, resume: str | None = None, **changes: Any) -> None:
        gc.collect()  # frees the memory of an earlier run
        self._device, self.generating_bytes = bench.device, 0
        self._before = self._device_bytes()
        model = make_model(*bench.pick((32_000, 512, 8, (8, 2)), (13, 32, 2, (4, 2))))
        started = _flat(model)
        trainer = _trainer(bench, name, model, self._reward, padding_free=False, **changes)
        trainer.train(resume_from_checkpoint=resume)
        self.weights = _flat(trainer.model)
        self.moved = float((self.weights - started).norm())
        line = next(line for line in reversed(trainer.state.log_history) if "loss" in line)
        self.cost = f"{line['step_time']:.2f} s and {mib(line['peak_memory/train'])} per step"

    def distance(self, other: _Run) -> float:
        """Return the distance to another run's weights, relative to the distance that these moved."""
        return float((other.weights - self.weights).norm()) / self.moved

    def _reward(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """Return rewards computed from token ids, so that they differ within a group."""
        self.generating_bytes = self._device_bytes() - self._before
        return [float(sum(ids) % 5) for ids in completion_ids]

    def _device_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def _flat(model: Any) -> Tensor:
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])


def same_run(bench: Bench, changes: Mapping[str, Any], **settings: Any) -> str:
    """Compare a run with `settings` and `changes` with two equal runs without `changes`.

    MismatchError if its weights differ more than ten times as much as those of the two equal runs.
    """

    def run(name: str, **more: Any) -> _Run:
        return _Run(bench, name, **{"max_steps": 3, **settings, **more})

    plain, again, changed = run("plain"), run("again"), run("changed", **changes)
    noise, difference = plain.distance(again), plain.distance(changed)
    require(
        difference <= 10 * noise, f"weights differ by {difference:.1e} of their movement, but equal runs by {noise:.1e}"
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


_OFFLOADS: dict[str, dict[str, Any]] = {
    "activation_offloading": {"gradient_checkpointing": True},
    "offload_during_rollout": {},
    "offload_frozen_models": {"beta": 0.1},
}
for _flag, _settings in _OFFLOADS.items():
    row(_flag, "a GPU", seconds=90)(partial(same_run, changes={_flag: True}, **_settings))


@row("resume", "a GPU", seconds=120)
def resume(bench: Bench) -> str:
    """Compare a run that resumes in the middle of a rollout with an uninterrupted one."""
    saved = {"max_steps": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 3}
    return same_run(bench, {"resume": str(bench.folder / "plain" / "checkpoint-3")}, **saved)


def train_on_ranks(bench: Bench, preset: str) -> str:
    """Compare two steps of `lowpeak grpo` on two ranks of a preset with two steps of one process."""
    make_model().save_pretrained(bench.folder / "model")
    make_tokenizer().save_pretrained(bench.folder / "model")
    lines = [json.dumps(line) for line in make_prompts(64)]
    (bench.folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    one, one_log = _command(bench, "single", 1)
    two, two_log = _command(bench, preset, 2)
    start = load_file(bench.folder / "model" / "model.safetensors")
    movement, difference = (_norm({name: values - base[name] for name, values in one.items()}) for base in (start, two))
    require(
        difference <= _RANKS_TOLERANCE * movement,
        f"weights differ from those of one process by {difference / movement:.1e} of their movement",
    )
    peaks = [mib(log["peak_memory/train"]) for log in (two_log, one_log)]
    return (
        f"weights differ from those of one process by {difference / movement:.0e} of their movement; "
        f"{two_log['step_time']:.2f} s per step and {peaks[0]} per rank ({one_log['step_time']:.2f} s and {peaks[1]})"
    )


for _preset in ("ddp", "fsdp2", "fsdp2-offload", "zero3", "zero3-offload"):
    _needs = ("2 GPUs", "DeepSpeed") if _preset.startswith("zero") else ("2 GPUs",)
    row(_preset, *_needs, seconds=150)(partial(train_on_ranks, preset=_preset))


def _command(bench: Bench, preset: str, num_ranks: int) -> tuple[dict[str, Tensor], Mapping[str, float]]:
    """Run `lowpeak grpo`; return the weights that it saved and the last step of its journal."""
    out = bench.folder / preset
    settings = {
        "model": bench.folder / "model",
        "dataset": bench.folder / "prompts.jsonl",
        "reward": "lowpeak.selftest.models.even_share",
        "output_dir": out,
        "accelerate_config": preset,
        "per_device_train_batch_size": 32 // num_ranks,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # with 1e-8, the last bit of a gradient near zero would change the weight by a full step
        "bf16": False,
        "use_cpu": bench.device.type == "cpu",
        "report_to": "none",
        **_ROLLOUTS,
        **({"num_processes": num_ranks} if num_ranks > 1 else {}),
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    status = subprocess.run([sys.executable, "-m", "lowpeak", "grpo", *words], check=False).returncode
    require(status == 0, f"lowpeak grpo under {preset} ended with status {status}")
    steps = (out / "journal" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return load_file(out / "model.safetensors"), json.loads(steps[-1])


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([values.double().norm() for values in tensors.values()]).norm())
