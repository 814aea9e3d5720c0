"""Tests of several ranks on one host: each preset of two ranks against one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

import torch
from safetensors.torch import load_file
from torch import Tensor

from lowpeak.selftest.models import make_model, make_prompts, make_tokenizer, mib
from lowpeak.selftest.runs import ROLLOUTS
from lowpeak.selftest.table import Bench, require, row

# Relative to the distance that a run moves its weights: several ranks sum gradients in another order.
_RANKS_TOLERANCE = 0.02


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
    costs = {
        name: {"step_seconds": log["step_time"], "train_peak_bytes": log["peak_memory/train"]}
        for name, log in (("two_ranks", two_log), ("one_process", one_log))
    }
    bench.record(difference=difference / movement, **costs)
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
    row(_preset, *_needs, seconds=300)(partial(train_on_ranks, preset=_preset))


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
        "use_cpu": not bench.on_gpu,
        "report_to": "none",
        **ROLLOUTS,
        **({"num_processes": num_ranks} if num_ranks > 1 else {}),
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    status = subprocess.run([sys.executable, "-m", "lowpeak", "grpo", *words], check=False).returncode
    require(status == 0, f"lowpeak grpo under {preset} ended with status {status}")
    steps = (out / "journal" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return load_file(out / "model.safetensors"), json.loads(steps[-1])


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([values.double().norm() for values in tensors.values()]).norm())
