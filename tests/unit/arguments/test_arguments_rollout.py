"""What a run says of its rollouts: how much of a sharded model may be gathered, in bytes or by TRL's names."""

from __future__ import annotations

import pytest

from lowpeak import GRPOConfig, PPOConfig, SFTConfig
from lowpeak.arguments.online import GATHER_ALL, resolve_gather_budget, resolve_online
from lowpeak.arguments.validation import check_values
from lowpeak.errors import ArgumentError

WHOLE, LAYERED = {"ds3_gather_for_generation": True}, {"ds3_gather_for_generation": False}
OLDER = {"disable_unwrapping_for_generation": True}


@pytest.mark.parametrize(
    ("arguments", "expected"),
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
def test_one_budget_is_said_in_three_ways_that_agree(tmp_path, arguments, expected):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **arguments)
    if expected is not ArgumentError:
        assert resolve_gather_budget(args) == expected
        return
    with pytest.raises(ArgumentError) as error:
        resolve_gather_budget(args)
    assert all(f"{name}={value!r}" in str(error.value) for name, value in arguments.items())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, None),
        (4096, 4096),
        ("1GiB", 1 << 30),
        ("1e6", 10**6),
        *((value, ArgumentError) for value in (0, 1.5, True, "much")),
    ],
)
def test_a_cache_is_as_large_as_a_number_or_a_size_says(tmp_path, arguments, expected):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, kv_cache_bytes=arguments)
    if expected is not ArgumentError:
        assert resolve_online(args, 1, 1).memory.kv_cache_bytes == expected
        return
    with pytest.raises(ArgumentError, match=f"kv_cache_bytes={arguments!r}"):
        resolve_online(args, 1, 1)


def test_mini_batches_that_hold_no_whole_groups_are_named_as_the_user_did(tmp_path):
    arguments = {"num_mini_batches": 3, "num_generations": 16, "gradient_accumulation_steps": 3}
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, **arguments)
    with pytest.raises(ArgumentError, match=r"num_mini_batches=2\b"):
        resolve_online(args, 1, 1)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
@pytest.mark.parametrize("config", [GRPOConfig, SFTConfig])
def test_checkpointing_of_another_type_is_named_as_the_user_did(tmp_path, config, name):
    with pytest.raises(ArgumentError, match=f"^{name}='no'"):
        check_values(config(output_dir=str(tmp_path), use_cpu=True, **{name: "no"}))


def test_two_names_of_checkpointing_that_differ_are_refused_and_equal_ones_are_taken(tmp_path):
    pytest.importorskip("transformers", minversion="5.24")  # which has the newer name
    both = {"gradient_checkpointing": False, "output_dir": str(tmp_path), "use_cpu": True}
    with pytest.raises(ArgumentError, match=r"gradient_checkpointing=False .*activation_checkpointing=True"):
        GRPOConfig(**both, activation_checkpointing=True)
    assert not GRPOConfig(**both, activation_checkpointing=False).checkpoints_activations
