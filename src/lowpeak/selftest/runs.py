"""Rows about whole runs: one that learns, one that resumes, offloads, and several ranks beside one."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor

from lowpeak import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from lowpeak.memory.resting import HostMover
from lowpeak.selftest.measure import mib
from lowpeak.selftest.models import (
    NUM_DIGITS,
    make_demonstrations,
    make_model,
    make_prompts,
    make_tokenizer,
    sorted_exactly,
)
from lowpeak.selftest.table import Bench, require, row
from lowpeak.training.resting import make_rest

_RANKS_APART = 0.02  # of the way that a run moves its weights: ranks add gradients in another order
_GAIN = 0.2  # of sampled accuracy


@row("GRPO learns", "a GPU", seconds=180)
def grpo_learns(bench: Bench, num_steps: int = 100) -> str:
    """Train noisy sort from a start that is wrong on purpose, and measure held-out accuracy before and after."""
    model, steps = make_model(), {"max_steps": 48, "per_device_train_batch_size": 128}
    start = {"learning_rate": 1e-3, "adam_beta2": 0.98, "lr_scheduler_type": "constant"}
    data = Dataset.from_list(make_demonstrations(48 * 128, 0))
    SFTTrainer(
        model,
        _arguments(SFTConfig, bench, "start", **steps, **start),
        train_dataset=data,
        processing_class=make_tokenizer(),
    ).train()
    args = _arguments(
        GRPOConfig, bench, "learns", **_ROLLOUTS, max_steps=num_steps, per_device_train_batch_size=256, warmup_steps=10
    )
    data = Dataset.from_list(make_prompts(32 * num_steps, 1))
    trainer = GRPOTrainer(model, sorted_exactly, args, data, processing_class=make_tokenizer())
    held_out = Dataset.from_list(make_prompts(bench.pick(512, 128), 2))
    before = trainer.evaluate(held_out)["eval_accuracy"]
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    after = trainer.evaluate(held_out)["eval_accuracy"]
    layout = trainer.run.sizes.choice
    told = f"sampled accuracy {before:.2f} before and {after:.2f} after {num_steps} steps, {seconds / num_steps:.2f} s a step"
    require(after >= before + _GAIN * num_steps / 100, told)
    require(layout.layout == "shared", f"rows are padded: {layout.why}")
    return told


_ROLLOUTS = {"num_generations": 8, "max_completion_length": NUM_DIGITS + 1, "kv_cache_bytes": 1 << 26}


def _arguments(config: Any, bench: Bench, name: str, **changes: Any) -> Any:
    return config(
        **{
            "output_dir": str(bench.folder / name),
            "use_cpu": bench.device.type == "cpu",
            "per_device_train_batch_size": 32,
            "learning_rate": 5e-4,
            "weight_decay": 0.0,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **changes,
        }
    )


class _Run:
    """A short GRPO run: its weights at the end, how far they have moved, and the device's bytes while it generated."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        model: Any,
        mover: HostMover | None = None,
        resume: Path | None = None,
        **changes: Any,
    ) -> None:
        gc.collect()  # an earlier run's memory
        self._device, self._seen = bench.device, list[int]()
        self._before = self._device_bytes()
        started = _flat(model)
        args = _arguments(GRPOConfig, bench, name, **_ROLLOUTS, **changes)
        data = Dataset.from_list(make_prompts(64, 1))
        trainer = GRPOTrainer(model, self._reward, args, data, processing_class=make_tokenizer(model.config.vocab_size))
        if mover is not None:
            trainer.maker.rest = make_rest(trainer, trainer.parts.policy, trainer.run.strategy, mover, least_bytes=64)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        self.weights = _flat(trainer.model)
        self.moved = float((self.weights - started).norm())
        self.log: Mapping[str, float] = [line for line in trainer.state.log_history if "loss" in line][-1]

    @property
    def generating_bytes(self) -> int:
        """Bytes of tensors on the device when the last rollout was rewarded."""
        return self._seen[-1]

    def apart(self, other: _Run) -> float:
        """How far the other's weights are, over the way that these have moved."""
        return float((other.weights - self.weights).norm()) / self.moved

    def _reward(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """A number from the tokens, so that rewards differ within a group."""
        self._seen.append(self._device_bytes() - self._before)
        return [float(sum(ids) % 5) for ids in completion_ids]

    def _device_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def _flat(model: Any) -> Tensor:
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])


def _require_same(plain: _Run, again: _Run, changed: _Run) -> str:
    """Return how far a changed run is from a plain one; MismatchError beyond ten times what repeating the plain one gives."""
    noise, apart = plain.apart(again), plain.apart(changed)
    require(
        apart <= 10 * noise, f"weights are {apart:.1e} of their way apart, where the same run again gives {noise:.1e}"
    )
    return "the same bits" if apart == 0 else f"weights {apart:.0e} of their way apart (the same run again {noise:.0e})"


@row("offload_during_rollout", "a GPU", seconds=90)
def offload_during_rollout(bench: Bench, mover: HostMover | None = None) -> str:
    """Compare a run whose gradients and states wait in host memory during rollouts with one whose stay."""
    flag: dict[str, Any] = {"offload_during_rollout": True} if bench.device.type == "cuda" else {}
    run = partial(_Run, bench, max_steps=3, padding_free=False)
    plain, again, changed = (run("a", _large(bench)), run("b", _large(bench)), run("c", _large(bench), mover, **flag))
    require(changed.log["offload/bytes"] > 0, "nothing left the device")
    return (
        f"{_require_same(plain, again, changed)}; {mib(changed.log['offload/bytes'])} left and came back in "
        f"{changed.log['time/offload']:.2f} s; {mib(changed.generating_bytes)} on the device meanwhile "
        f"({mib(plain.generating_bytes)} without)"
    )


@row("offload_frozen_models", "a GPU", seconds=90)
def offload_frozen_models(bench: Bench) -> str:
    """Compare a run whose reference waits in host memory with one whose reference stays."""
    flag: dict[str, Any] = {"offload_frozen_models": True} if bench.device.type == "cuda" else {}
    run = partial(_Run, bench, max_steps=3, padding_free=False, beta=0.1)
    plain, again, changed = run("a", _large(bench)), run("b", _large(bench)), run("c", _large(bench), **flag)
    return (
        f"{_require_same(plain, again, changed)}; {mib(changed.generating_bytes)} on the device while it generates "
        f"({mib(plain.generating_bytes)} without), scoring {changed.log['time/score']:.2f} s ({plain.log['time/score']:.2f})"
    )


def _large(bench: Bench) -> Any:
    num_ids, hidden, layers, heads = bench.pick((32_000, 512, 8, (8, 2)), (13, 32, 2, (4, 2)))
    return make_model(num_ids, hidden, layers, heads)


@row("resume", "a GPU", seconds=120)
def resume(bench: Bench) -> str:
    """Compare a run that resumes in the middle of a rollout with one that was not interrupted."""
    run = partial(_Run, bench, max_steps=4, num_iterations=2, save_strategy="steps", save_steps=3)
    plain, again = run("a", make_model()), run("b", make_model())
    return _require_same(plain, again, run("a", make_model(), resume=bench.folder / "a" / "checkpoint-3"))


def train_on_ranks(bench: Bench, preset: str) -> str:
    """Compare two steps of `lowpeak grpo` on two ranks of a preset with those of one process."""
    make_model().save_pretrained(bench.folder / "model")
    make_tokenizer().save_pretrained(bench.folder / "model")
    lines = [json.dumps(line) for line in make_prompts(64, 1)]
    (bench.folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    one, one_log = _command(bench, "single", 1)
    two, two_log = _command(bench, preset, 2)
    start = load_file(bench.folder / "model" / "model.safetensors")
    way, apart = (_norm({name: values - base[name] for name, values in one.items()}) for base in (start, two))
    require(apart <= _RANKS_APART * way, f"weights are {apart / way:.1e} of their way from those of one process")
    peaks = [mib(log["peak_memory/train"]) for log in (two_log, one_log)]
    return (
        f"weights {apart / way:.0e} of their way from those of one process; {two_log['step_time']:.2f} s a step and "
        f"{peaks[0]} a rank ({one_log['step_time']:.2f} s and {peaks[1]})"
    )


for _preset, _needs in {
    "ddp": (),
    "fsdp2": (),
    "fsdp2-offload": (),
    "zero3": ("DeepSpeed",),
    "zero3-offload": ("DeepSpeed",),
}.items():
    row(_preset, "2 GPUs", *_needs, seconds=150)(partial(train_on_ranks, preset=_preset))


def _command(bench: Bench, preset: str, num_ranks: int) -> tuple[dict[str, Tensor], Mapping[str, float]]:
    """Run `lowpeak grpo`; return the weights that it saved and its journal's last step."""
    out = bench.folder / preset
    settings = {
        "model": bench.folder / "model",
        "dataset": bench.folder / "prompts.jsonl",
        "reward": "lowpeak.selftest.models.digits_in_place",
        "output_dir": out,
        "accelerate_config": preset,
        "per_device_train_batch_size": 32 // num_ranks,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # with 1e-8, where a gradient is nearly zero its last bit would become a whole step
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
