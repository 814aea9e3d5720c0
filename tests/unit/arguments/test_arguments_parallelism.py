"""What a run asks of accelerate: settled, or refused, before anything loads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from transformers import Qwen2Config
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from lowpeak.arguments.parallelism import (
    NOT_PARALLEL,
    ModelParallel,
    check_axes,
    disable_accelerate_fsdp,
    refuse_unsupported_parallelism,
    resolve_model_parallel,
    sync_deepspeed_config,
)
from lowpeak.cli.accelerate_config import PRESET_FOLDER
from lowpeak.errors import ArgumentError

ON = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.mark.parametrize(("axis", "words"), [("cp_size", "context"), ("sp_size", "sequence"), ("pp_size", "pipeline")])
def test_a_model_is_cut_over_data_ranks_and_tensors_alone(axis, words):
    message = f"{axis}=2 .* {words} "
    with pytest.raises(ArgumentError, match=message):
        check_axes({axis: 2}, "a.yaml")
    with pytest.raises(ArgumentError, match=message):
        resolve_model_parallel({**ON, f"PARALLELISM_CONFIG_{axis.upper()}": "2"}, None)
    with pytest.raises(ArgumentError, match=message):
        resolve_model_parallel({}, SimpleNamespace(**{axis: 2}))


@pytest.mark.parametrize("value", ["x", {"tp_size": 2}])
def test_a_parallelism_config_that_is_none_is_named(value):
    with pytest.raises(ArgumentError, match="parallelism_config="):
        resolve_model_parallel({}, value)


def test_hybrid_sharding_cuts_no_tensors():
    environ = {**ON, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "1"}
    assert resolve_model_parallel(environ | {"PARALLELISM_CONFIG_CP_BACKEND": "torch"}, None) == NOT_PARALLEL
    assert resolve_model_parallel({}, SimpleNamespace(dp_shard_size=2, tp_size=1)) == NOT_PARALLEL
    refuse_unsupported_parallelism({}, {"dtype": "auto", "tp_plan": None})


TENSORS = {**ON, "PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4", "WORLD_SIZE": "8"}


def test_tensor_parallelism_is_asked_of_accelerate():
    assert resolve_model_parallel(TENSORS, None) == ModelParallel(2, 4)
    assert resolve_model_parallel({"WORLD_SIZE": "2"}, SimpleNamespace(tp_size=2, dp_shard_size=1)) == ModelParallel(
        2, 1
    )


@pytest.mark.parametrize(
    ("changes", "others", "pattern"),
    [
        ({"WORLD_SIZE": "4"}, "", "tp_size=2.* dp_shard_size=4 .* 4 .* 8, .*2 x 2.*4 x 1"),
        ({}, "DeepSpeed", "DeepSpeed"),
        ({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "", "dp_replicate_size"),
    ],
)
def test_tensor_parallelism_fills_the_processes_with_fsdp2_alone(changes, others, pattern):
    with pytest.raises(ArgumentError, match=pattern):
        resolve_model_parallel(TENSORS | changes, None, others)


def test_beside_tensor_parallelism_fsdp_is_not_accelerate_s():
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "false"}
    disable_accelerate_fsdp(environ)
    assert environ["ACCELERATE_USE_FSDP"] == "false"
    with pytest.raises(ArgumentError, match=r"fsdp_offload_params"):
        disable_accelerate_fsdp({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"})


@pytest.mark.parametrize(
    ("environ", "loading", "pattern"),
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "Megatron-LM"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "mixed_precision: fp8"),
        ({}, {"tp_plan": "auto"}, "model_init_kwargs .*tp_plan"),
    ],
)
def test_what_of_accelerate_or_of_loading_lowpeak_does_not_run_is_refused(environ, loading, pattern):
    with pytest.raises(ArgumentError, match=pattern):
        refuse_unsupported_parallelism(environ, loading)


RUN = SimpleNamespace(
    max_grad_norm=0.25, per_device_train_batch_size=8, gradient_accumulation_steps=4, world_size=2, hf_deepspeed_config=None,
    bf16=True,
)  # fmt: skip
SAME = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "train_batch_size": 64}


@pytest.mark.parametrize("own", [{}, {"gradient_clipping": "auto"}, {"gradient_clipping": 0.25}, SAME], ids=str)
def test_deepspeeds_config_may_say_what_the_run_does(own):
    settled = {"zero_optimization": {"stage": 2}, **own}
    sync_deepspeed_config(settled, RUN)
    batches = dict.fromkeys(own.keys() & SAME.keys(), "auto")
    sharding = {"stage": 2, "reduce_bucket_size": "auto"}
    precision = {"bf16": {"enabled": True}}
    assert settled == {"zero_optimization": sharding, "gradient_clipping": 0.25, **precision, **batches}


ABSENT: dict[str, object] = {"zero_optimization": {"stage": 3}}
PRESETS = {path.stem: json.loads(path.read_text()) for path in PRESET_FOLDER.glob("*.json")}


@pytest.mark.parametrize("preset", [*PRESETS.values(), ABSENT], ids=[*PRESETS, "absent"])
def test_buckets_of_every_deepspeed_preset_follow_the_models_width(preset):
    pytest.importorskip("deepspeed")
    config = HfTrainerDeepSpeedConfig(preset)
    sync_deepspeed_config(config.config, RUN)
    model = SimpleNamespace(config=Qwen2Config(hidden_size=96))
    config.trainer_config_finalize(SimpleNamespace(get_warmup_steps=lambda steps: 0), model, 1)
    sizes = config.config["zero_optimization"]
    assert sizes["reduce_bucket_size"] == 96 * 96
    if sizes["stage"] == 3:
        # The presets prefetch nothing.
        assert sizes["stage3_prefetch_bucket_size"] == (int(0.9 * 96 * 96) if preset is ABSENT else 0)
        assert sizes["stage3_param_persistence_threshold"] == (10 * 96 if preset is ABSENT else 10_000)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping=1.0 .* max_grad_norm=0.25"),
        ({"train_batch_size": 16}, "train_batch_size=16, .* 64"),
        ({"bf16": {"enabled": False}}, "bf16.enabled=False .* bf16=True"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1, .* 4"),
        *(({"zero_optimization": {"stage": stage}}, f"stage {stage}: ") for stage in (0, 7)),
        ({"zero_optimization": None}, "stage 0: "),
    ],
)
def test_a_deepspeed_config_that_contradicts_the_run_is_refused(config, message):
    with pytest.raises(ArgumentError, match=message):
        sync_deepspeed_config({"zero_optimization": {"stage": 3}, **config}, RUN)


def test_a_size_that_is_no_number_is_refused():
    with pytest.raises(ArgumentError, match=r"a\.yaml .*tp_size: many"):
        check_axes({"tp_size": "many"}, "a.yaml")
