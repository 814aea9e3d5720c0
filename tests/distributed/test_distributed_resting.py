"""What rests on the host while completions are written leaves every strategy's shards as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spawn import launch

STRATEGIES = ("fsdp2", "zero2", "zero3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each strategy with and without resting, on two ranks."""
    out = tmp_path_factory.mktemp("resting")
    launch("run_resting.py", [str(out), *STRATEGIES])
    return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_and_states_leave_while_the_engine_writes_and_the_run_is_the_same_bits(
    runs: Path, strategy: str
) -> None:
    for rank in (0, 1):
        found = torch.load(runs / f"{strategy}-{rank}.pt")
        (plain, there, _), (rested, away, told) = found["False"], found["True"]
        assert all(num_bytes > 0 for num_bytes in there)
        assert away == [0] * len(there)
        assert max(number for number in told if number is not None) >= max(there)
        assert rested.keys() == plain.keys()
        for name, weight in plain.items():
            assert torch.equal(weight, rested[name]), name
