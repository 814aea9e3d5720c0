"""Real weights on two ranks under each strategy: the steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_runs import make_real
from setups import allow_meshes_on_cpu, forget, joined, keep, prepare

import lowpeak
from child_processes import succeed_on_ranks

STRATEGIES = ("ddp", "fsdp2", "zero3")


def train_on_ranks(place: Path, strategy: str, smollm2: str, out: Path, world_size: int) -> None:
    """Take two steps of SGD, of eight completions in all; a mesh on CPUs is allowed between config and trainer."""
    arguments = prepare(strategy)
    config = lowpeak.GRPOConfig

    def config_on_ranks(**given):
        args = config(**given)
        allow_meshes_on_cpu()
        return args

    lowpeak.GRPOConfig = config_on_ranks
    try:
        sizes = {"per_device_train_batch_size": 8 // world_size, "optim": "sgd", "learning_rate": 1e-3}
        trainer = make_real("GRPO", place / "run", smollm2, **sizes, **arguments)
    finally:
        lowpeak.GRPOConfig = config
    trainer.train()
    logged = [(row["loss"], row["grad_norm"], row["reward"]) for row in trainer.state.log_history if "loss" in row]
    found = {"logged": logged, "weights": joined(trainer.run.strategy, trainer.model_wrapped, 1 << 26)}
    keep(trainer, found, out / f"{strategy}.pt")
    forget()


@pytest.fixture(scope="module")
def alone(smollm2, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    succeed_on_ranks(train_on_ranks, out / "single", "single", smollm2, out, 1, world_size=1)
    return torch.load(out / "single.pt")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_make_the_steps_of_one_process(alone, strategy, smollm2, tmp_path):
    succeed_on_ranks(train_on_ranks, tmp_path / strategy, strategy, smollm2, tmp_path, 2, world_size=2, seconds=600)
    ours = torch.load(tmp_path / f"{strategy}.pt")
    torch.testing.assert_close(torch.tensor(ours["logged"]), torch.tensor(alone["logged"]), rtol=1e-3, atol=1e-5)
    assert ours["weights"].keys() == alone["weights"].keys()
    for name, values in alone["weights"].items():
        torch.testing.assert_close(ours["weights"][name], values, atol=5e-6, rtol=0)
