"""What arguments and environment ask of accelerate, as a trainer meets it: resolved, or refused before a model loads."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from unittest.mock import patch

import pytest

from lowpeak import GRPOConfig, GRPOTrainer, PPOConfig, SFTConfig, SFTTrainer
from lowpeak.errors import ArgumentError

ROWS = [{"prompt": "1", "completion": "2"}]
ZERO = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def environment():
    """An environment that is put back."""
    with patch.dict(os.environ):
        yield


def config(folder, kind=GRPOConfig, **arguments):
    return kind(output_dir=str(folder), report_to="none", **{"use_cpu": True, **arguments})


def make(folder, **arguments):
    return GRPOTrainer("nowhere", reward_funcs=len, args=config(folder, **arguments), train_dataset=ROWS)


def test_half_precision_of_an_accelerate_config_is_refused_as_the_argument_is(tmp_path):
    for precision in ("fp16", "fp8"):
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
        with pytest.raises(ArgumentError, match=f"mixed_precision: {precision}"):
            config(tmp_path)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    assert config(tmp_path).mixed_precision == "no"


FSDP = "FSDP .*NO.* 1 .*cpu"


def test_fsdp_that_would_be_something_else_is_an_error_before_the_model_loads(tmp_path):
    with pytest.raises(ArgumentError, match=FSDP):
        make(tmp_path, fsdp=True)
    with pytest.raises(ArgumentError, match=FSDP):
        SFTTrainer("nowhere", args=config(tmp_path, SFTConfig, fsdp=True), train_dataset=ROWS)
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    with pytest.raises(ArgumentError, match=FSDP):
        make(tmp_path)


def test_ranks_that_would_each_train_by_themselves_are_an_error(tmp_path):
    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(ArgumentError, match=r"^2 .*use_cpu=True"):
        make(tmp_path, use_cpu=False, per_device_train_batch_size=8)


@pytest.mark.parametrize(
    ("environ", "arguments"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}, {}),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}),
        ({}, {"fsdp": True, "fsdp_config": {"version": 1}}),
        ({}, {"fsdp": "full_shard offload", "fsdp_config": {"fsdp_version": "1"}}),
    ],
)
def test_version_1_of_fsdp_is_refused_with_the_command_that_converts_a_file(environ, arguments, tmp_path):
    os.environ.update(environ)
    remedy = "fsdp_version: 2.*accelerate to-fsdp2 --config_file FILE --output_file FILE"
    with pytest.raises(ArgumentError, match=remedy):
        config(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("fsdp", "given", "wanted"),
    [
        (True, {}, {"reshard_after_forward": True}),
        ("true", {"version": 2}, {"reshard_after_forward": True}),
        ("shard_grad_op offload auto_wrap", {}, {"reshard_after_forward": False, "cpu_offload": True}),
    ],
)
def test_fsdp_in_arguments_is_version_2(fsdp, given, wanted, tmp_path):
    os.environ["FSDP_VERSION"] = "1"  # of a launcher that does not use FSDP
    plugin = config(tmp_path, fsdp=fsdp, fsdp_config=given).fsdp_plugin_args
    assert plugin.items() >= {"fsdp_version": 2, **wanted}.items()


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_a_deepspeed_config_gets_the_run_s_norm_and_precision(where, tmp_path):
    if where == "argument":
        args = config(tmp_path, deepspeed=ZERO, max_grad_norm=0.3, bf16=True)
    else:
        (tmp_path / "zero.json").write_text(json.dumps(ZERO))
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(tmp_path / "zero.json"))
        args = config(tmp_path, max_grad_norm=0.3, bf16=True)
    resolved = args.deepspeed_plugin.hf_ds_config.config
    assert resolved["gradient_clipping"] == 0.3
    assert resolved["bf16"]["enabled"]
    assert not {"gradient_clipping", "bf16"} & ZERO.keys()


@pytest.mark.parametrize("rate", [None, 1e-2])
def test_a_critics_own_rate_needs_an_optimizer_that_is_not_deepspeeds(tmp_path, rate):
    own = {**ZERO, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "value_learning_rate": rate}
    with pytest.raises(ArgumentError, match="DeepSpeed") if rate else nullcontext():
        PPOConfig(deepspeed=own, **arguments)
    PPOConfig(deepspeed=ZERO, **arguments)


def test_other_parallelism_is_refused_where_it_is_asked_for(tmp_path):
    from accelerate.parallelism_config import ParallelismConfig

    for precision, names in (
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "cp_size=2 .*parallelism_config"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "tp_size=2 .*dp_shard_size=1 .*parallelism_config"),
        ({"model_init_kwargs": '{"tp_plan": "auto"}'}, "model_init_kwargs .*tp_plan"),
    ):
        with pytest.raises(ArgumentError, match=names):
            config(tmp_path, **precision)
