"""Trains every case of `CASES` under one strategy and writes each one's losses and weights: `run_numbers.py STRATEGY OUT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from setups import build, named_models, prepare, spread

# Settings, of which each changes what ranks must agree on.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {}),
    "grpo_reused": ("GRPO", {"num_iterations": 2, "loss_type": "grpo", "max_steps": 4}),
    "grpo_accumulated": ("GRPO", {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}),
    "grpo_sequence": ("GRPO", {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "bnpo"}),
    "grpo_one_group": ("GRPO", {"num_generations": 8}),
    "rloo": ("RLOO", {"beta": 0.0, "num_generations": 4}),
    "sft": ("SFT", {}),
    "frozen": (
        "GRPO",
        {"beta": 0.1, "num_iterations": 2, "max_steps": 5, "sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
}


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The policy's weights, put together from the strategy's slices."""
    found: dict[str, list[torch.Tensor]] = {}
    for piece in trainer.run.strategy.slices(trainer.model_wrapped, 1 << 10, None):
        found.setdefault(piece.name, []).append(piece.values.clone())
    return {name: torch.cat(parts) for name, parts in found.items()}


def models_of(name: str, out: Path) -> dict[str, Any]:
    """Policy, reference and reward model loaded by name, where a case is about models that are never trained."""
    if name != "frozen":
        return {}
    policy, judge = named_models(out / "named")
    return {"model": policy, "rewards": [spread, judge]}


def main() -> None:
    """All cases in one process group."""
    strategy, out = sys.argv[1], Path(sys.argv[2])
    for name, (algorithm, arguments) in CASES.items():
        trainer = build(algorithm, out / strategy / name, {**prepare(strategy), **arguments}, **models_of(name, out))
        trainer.train()
        weights = weights_of(trainer)
        steps = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        parameter = type(next(trainer.model.parameters())).__name__
        if trainer.is_world_process_zero():
            torch.save(
                {
                    "weights": weights,
                    "steps": steps,
                    "parameter": parameter,
                    "strategy": type(trainer.run.strategy).__name__,
                },
                out / f"{strategy}-{name}.pt",
            )


if __name__ == "__main__":
    main()
