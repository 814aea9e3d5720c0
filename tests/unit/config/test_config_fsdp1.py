"""FSDP1's settings as FSDP2's: what accelerate's own converter makes of them, but for what it changes without a word."""

from __future__ import annotations

import pytest
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

from lowpeak.config.asked import settled_fsdp
from lowpeak.config.fsdp1 import convert_environment, convert_fsdp1, is_fsdp1
from lowpeak.errors import ArgumentError

WRITTEN = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "backward_prefetch": "BACKWARD_PRE",
    "cpu_ram_efficient_loading": True,
    "forward_prefetch": False,
    "offload_params": True,
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "SHARDED_STATE_DICT",
    "sync_module_states": True,
    "use_orig_params": True,
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_conversion_is_accelerate_s(strategy):
    given = {**WRITTEN, "sharding_strategy": strategy}
    theirs = convert_config_to_fsdp2({"fsdp_config": {f"fsdp_{name}": value for name, value in given.items()}})
    ours = convert_fsdp1(given).settings
    assert {f"fsdp_{name}": value for name, value in ours.items()} | {"fsdp_version": 2} == theirs["fsdp_config"]
    assert given["sharding_strategy"] == strategy


def test_the_warning_says_what_changed():
    assert convert_fsdp1(WRITTEN).sentence("a.yaml") == (
        "a.yaml asks for FSDP1, which lowpeak runs as FSDP2: sharding FULL_SHARD is now reshard_after_forward=true; "
        "backward_prefetch, forward_prefetch, sync_module_states, use_orig_params left out, FSDP2 has no such settings. Say "
        "fsdp_version 2 (`accelerate to-fsdp2` rewrites a file) to have no warning."
    )


@pytest.mark.parametrize(
    ("said", "reshard"),
    [("full_shard", True), (1, True), ("2", False), ("SHARD_GRAD_OP", False), ("true", True), (False, False)],
)
def test_a_strategy_may_be_a_name_a_number_or_a_switch(said, reshard):
    assert convert_fsdp1({"reshard_after_forward": said}).settings == {"reshard_after_forward": reshard}


@pytest.mark.parametrize(
    ("strategy", "remedy"), [("NO_SHARD", "ddp"), ("4", "hsdp"), ("HYBRID_SHARD_ZERO2", "hsdp"), ("HALF", "FULL_SHARD")]
)
def test_a_sharding_that_fsdp2_does_not_have_is_an_error(strategy, remedy):
    with pytest.raises(ArgumentError, match=rf"{strategy} cannot be run as FSDP2: .*{remedy}"):
        convert_fsdp1({"sharding_strategy": strategy})


def test_an_environment_is_changed_where_it_asks_for_version_1():
    environ = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT",
        "HOME": "here",
    }
    converted = convert_environment(environ)
    assert environ == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_VERSION": "2",
        "HOME": "here",
    }
    assert "use_orig_params left out" in converted.sentence("it")
    assert convert_environment(environ) is None


@pytest.mark.parametrize("environ", [{}, {"FSDP_VERSION": "1"}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}])
def test_an_environment_without_version_1_is_left_alone(environ):
    before = dict(environ)
    assert convert_environment(environ) is None
    assert environ == before


def test_training_arguments_of_version_1_become_version_2_and_the_user_s_own_dict_stays():
    config = {"fsdp_version": 1, "reshard_after_forward": "shard_grad_op", "use_orig_params": True}
    fsdp, settled, converted = settled_fsdp(True, config)
    assert (fsdp, settled) == (True, {"version": 2, "reshard_after_forward": False})
    assert "SHARD_GRAD_OP" in converted.sentence("fsdp")
    assert config == {"fsdp_version": 1, "reshard_after_forward": "shard_grad_op", "use_orig_params": True}


def test_the_older_words_say_a_strategy_and_a_place():
    _, settled, converted = settled_fsdp("shard_grad_op offload auto_wrap", {"min_num_params": 5})
    assert settled == {"min_num_params": 5, "cpu_offload": True, "reshard_after_forward": False, "version": 2}
    assert converted is not None
    assert settled_fsdp("full_shard", None)[1]["reshard_after_forward"] is True


@pytest.mark.parametrize("fsdp", [True, "true"])
def test_training_arguments_of_version_2_are_kept(fsdp):
    assert settled_fsdp(fsdp, {"fsdp_offload_params": True}) == (True, {"offload_params": True, "version": 2}, None)
    assert settled_fsdp(None, None) == (None, None, None)


def test_a_version_is_found_under_either_name():
    assert is_fsdp1({})
    assert not is_fsdp1({}, default=2)
    assert not is_fsdp1({"version": 2})
    assert not is_fsdp1({"fsdp_version": "2"})
