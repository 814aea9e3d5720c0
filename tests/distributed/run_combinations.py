"""Trains every combination that stands under one strategy, in one process group: `run_combinations.py STRATEGY OUT`."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from combinations import cases_of, make, name_of
from run_numbers import weights_of
from safetensors import safe_open

MEASURED = ("eval_reward", "eval_loss", "eval_entropy", "eval_reward_std", "eval_frac_reward_zero_std")


def run(case: dict[str, str], folder: Path) -> dict[str, Any]:
    """Train, evaluate and save one combination: its weights before and after, its numbers, what was saved."""
    start = time.perf_counter()
    trainer = make(case, folder)
    before = weights_of(trainer)
    trainer.train()
    history = trainer.state.log_history
    return {
        "before": before,
        "after": weights_of(trainer),
        "steps": [(row["loss"], row["grad_norm"]) for row in history if "loss" in row],
        "evaluations": [{name: row[name] for name in MEASURED} for row in history if "eval_reward" in row],
        "finite": all(math.isfinite(value) for row in history for value in row.values() if isinstance(value, float)),
        "saved": saved(folder / "checkpoint-3") if trainer.is_world_process_zero() else {},
        "strategy": type(trainer.run.strategy).__name__,
        "seconds": time.perf_counter() - start,
    }


def saved(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, or the adapter's."""
    (file,) = checkpoint.glob("*model.safetensors")
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def main() -> None:
    """All of them, one after the other."""
    strategy, out = sys.argv[1], Path(sys.argv[2])
    found = {name_of(case): run(case, out / strategy / name_of(case)) for case in cases_of(strategy)}
    torch.save(
        found, out / f"{strategy}-{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}.pt"
    )


if __name__ == "__main__":
    main()
