"""One process, DDP, FSDP2 and ZeRO-1/2/3 on the same seeds: the same losses, gradient norms and weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from setups import STRATEGIES
from spawn import launch

NAMES = (
    "grpo",
    "grpo_reused",
    "grpo_accumulated",
    "grpo_sequence",
    "grpo_one_group",
    "grpo_experts",
    "rloo",
    "sft",
    "frozen",
)
NAMES += ("online_dpo", "reward", "ppo", "ppo_own_critic", "ppo_second_adapter")
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case under one process and under each strategy on two ranks."""
    out = tmp_path_factory.mktemp("numbers")
    launch("run_numbers.py", ["single", str(out)], world_size=1)
    for strategy in STRATEGIES:
        launch("run_numbers.py", [strategy, str(out)])
    return out


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_two_ranks_is_the_run_of_one_process(runs: Path, strategy: str, name: str) -> None:
    alone, ours = (torch.load(runs / f"{kind}-{name}.pt") for kind in ("single", strategy))
    assert ours["weights"].keys() == alone["weights"].keys()
    for weight, values in alone["weights"].items():
        torch.testing.assert_close(ours["weights"][weight], values, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.tensor(ours["steps"]), torch.tensor(alone["steps"]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("ddp", ("Parameter", "Replicated")), ("fsdp2", ("DTensor", "Fsdp2")), ("zero3", ("Parameter", "Zero"))],
)
def test_what_was_asked_for_is_in_force(runs: Path, strategy: str, expected: tuple[str, str]) -> None:
    run = torch.load(runs / f"{strategy}-grpo.pt")
    assert (run["parameter"], run["strategy"]) == expected
