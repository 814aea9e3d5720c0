"""How much of a sharded model may be gathered, said in bytes or by TRL's names."""

from __future__ import annotations

import pytest

from lowpeak import GRPOConfig
from lowpeak.config.rollout import ALL, resolve_gather_budget
from lowpeak.errors import ArgumentError


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"gather_budget": "auto"}, None),
        ({"gather_budget": 0}, 0),
        ({"gather_budget": "8GiB"}, 8 << 30),
        ({"gather_budget": "1.5 GB"}, 1_500_000_000),
        ({"gather_budget": "4096"}, 4096),
        ({"ds3_gather_for_generation": True}, ALL),
        ({"ds3_gather_for_generation": False}, 0),
        ({"disable_unwrapping_for_generation": True}, 0),
        ({"disable_unwrapping_for_generation": True, "ds3_gather_for_generation": False, "gather_budget": "0"}, 0),
    ],
)
def test_one_budget_is_said_in_three_ways(tmp_path, said, expected):
    assert resolve_gather_budget(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **said)) == expected


@pytest.mark.parametrize(
    "said",
    [
        {"gather_budget": "8GiB", "ds3_gather_for_generation": True},
        {"gather_budget": "auto", "ds3_gather_for_generation": False},
        {"disable_unwrapping_for_generation": True, "ds3_gather_for_generation": True},
    ],
)
def test_what_contradicts_itself_is_refused_by_name(tmp_path, said):
    with pytest.raises(ArgumentError) as error:
        resolve_gather_budget(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **said))
    assert all(name in str(error.value) for name in said)


def test_what_is_no_size_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="'8GiB' or '500MB'"):
        resolve_gather_budget(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, gather_budget="much"))
