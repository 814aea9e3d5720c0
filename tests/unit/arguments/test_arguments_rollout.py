"""What a run says of its rollouts: how much of a sharded model may be gathered, in bytes or by TRL's names."""

from __future__ import annotations

import pytest

from lowpeak import GRPOConfig
from lowpeak.arguments import GATHER_ALL, resolve_gather_budget
from lowpeak.errors import ArgumentError

WHOLE, LAYERED = {"ds3_gather_for_generation": True}, {"ds3_gather_for_generation": False}
OLDER = {"disable_unwrapping_for_generation": True}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"gather_budget": "auto"}, None),
        ({"gather_budget": 0}, 0),
        ({"gather_budget": "8GiB"}, 8 << 30),
        ({"gather_budget": "1.5 GB"}, 1_500_000_000),
        ({"gather_budget": "4096"}, 4096),
        (WHOLE, GATHER_ALL),
        (LAYERED, 0),
        (OLDER, 0),
        ({**OLDER, **LAYERED, "gather_budget": "0"}, 0),
        ({"gather_budget": "8GiB", **WHOLE}, ArgumentError),
        ({"gather_budget": "auto", **LAYERED}, ArgumentError),
        ({**OLDER, **WHOLE}, ArgumentError),
        ({"gather_budget": "much"}, ArgumentError),
    ],
)
def test_one_budget_is_said_in_three_ways_that_agree(tmp_path, said, expected):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **said)
    if expected is not ArgumentError:
        assert resolve_gather_budget(args) == expected
        return
    with pytest.raises(ArgumentError) as error:
        resolve_gather_budget(args)
    assert all(f"{name}={value!r}" in str(error.value) for name, value in said.items())
