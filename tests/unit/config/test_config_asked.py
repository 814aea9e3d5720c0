"""What a run asks of accelerate: settled, or refused, before anything loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lowpeak.config.asked import (
    WHOLE,
    Cut,
    refuse_axes,
    refuse_other_parallelism,
    settle_clipping,
    settle_deepspeed,
    settled_cut,
    take_fsdp_over,
)
from lowpeak.errors import ArgumentError

ON = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.mark.parametrize(("axis", "words"), [("cp_size", "context"), ("sp_size", "sequence"), ("pp_size", "pipeline")])
def test_a_model_is_cut_over_data_ranks_and_tensors_alone(axis, words):
    message = f"{axis}=2 .* {words} "
    with pytest.raises(ArgumentError, match=message):
        refuse_axes({axis: 2}, "a.yaml")
    with pytest.raises(ArgumentError, match=message):
        settled_cut({**ON, f"PARALLELISM_CONFIG_{axis.upper()}": "2"}, None)
    with pytest.raises(ArgumentError, match=message):
        settled_cut({}, SimpleNamespace(**{axis: 2}))


def test_hybrid_sharding_cuts_no_tensors():
    environ = {**ON, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "1"}
    assert settled_cut(environ | {"PARALLELISM_CONFIG_CP_BACKEND": "torch"}, None) == WHOLE
    assert settled_cut({}, SimpleNamespace(dp_shard_size=2, tp_size=1)) == WHOLE
    refuse_other_parallelism({}, {"dtype": "auto", "tp_plan": None})


def test_tensor_parallelism_is_asked_of_accelerate_and_fills_the_processes():
    environ = {**ON, "PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}
    assert settled_cut({**environ, "WORLD_SIZE": "8"}, None) == Cut(2, 4)
    assert settled_cut({"WORLD_SIZE": "2"}, SimpleNamespace(tp_size=2, dp_shard_size=1)) == Cut(2, 1)
    with pytest.raises(ArgumentError, match=r"tp_size=2 and dp_shard_size=4 in .* 4 processes"):
        settled_cut({**environ, "WORLD_SIZE": "4"}, None)
    with pytest.raises(ArgumentError, match=r"DeepSpeed"):
        settled_cut({**environ, "WORLD_SIZE": "8"}, None, "DeepSpeed")
    with pytest.raises(ArgumentError, match=r"dp_replicate_size"):
        settled_cut({**environ, "WORLD_SIZE": "8", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, None)


def test_beside_tensor_parallelism_fsdp_is_not_accelerate_s():
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "false"}
    take_fsdp_over(environ)
    assert environ["ACCELERATE_USE_FSDP"] == "false"
    with pytest.raises(ArgumentError, match=r"fsdp_offload_params"):
        take_fsdp_over({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"})


def test_megatron_and_a_model_that_is_cut_where_it_loads_are_refused():
    with pytest.raises(ArgumentError, match="Megatron-LM"):
        refuse_other_parallelism({"ACCELERATE_USE_MEGATRON_LM": "true"}, {})
    with pytest.raises(ArgumentError, match="model_init_kwargs has tp_plan"):
        refuse_other_parallelism({}, {"tp_plan": "auto"})


@pytest.mark.parametrize("config", [{}, {"gradient_clipping": "auto"}, {"gradient_clipping": 0.25}])
def test_the_run_s_own_gradient_norm_clips_under_deepspeed(config):
    settled = dict(config)
    settle_clipping(settled, 0.25)
    assert settled == {"gradient_clipping": 0.25}


def test_a_clipping_of_the_config_s_own_is_an_error_where_it_differs():
    with pytest.raises(ArgumentError, match=r"gradient_clipping=1.0 .* max_grad_norm=0.25"):
        settle_clipping({"gradient_clipping": 1.0}, 0.25)


RUN = SimpleNamespace(
    max_grad_norm=0.25,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    world_size=2,
    hf_deepspeed_config=None,
)


@pytest.mark.parametrize(
    "batches", [{}, {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "train_batch_size": 64}]
)
def test_batches_of_deepspeed_s_config_may_say_what_the_arguments_do(batches):
    settled = {"zero_optimization": {"stage": 2}, **batches}
    settle_deepspeed(settled, RUN)
    assert settled == {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.25, **dict.fromkeys(batches, "auto")}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_size": 16}, "train_batch_size=16, .* 64"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1, .* 4"),
        ({"zero_optimization": {"stage": 0}}, "stage 0: "),
        ({"zero_optimization": {"stage": 7}}, "stage 7: "),
        ({"zero_optimization": None}, "stage 0: "),
    ],
)
def test_a_deepspeed_config_that_contradicts_the_run_is_refused(config, message):
    with pytest.raises(ArgumentError, match=message):
        settle_deepspeed({"zero_optimization": {"stage": 3}, **config}, RUN)


def test_a_size_that_is_no_number_is_refused():
    with pytest.raises(ArgumentError, match=r"a\.yaml .*tp_size: many"):
        refuse_axes({"tp_size": "many"}, "a.yaml")
