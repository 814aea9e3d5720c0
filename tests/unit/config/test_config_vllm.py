"""The arguments of vLLM act where it runs, or raise with what to do."""

from __future__ import annotations

from dataclasses import fields

import pytest

from lowpeak import GRPOConfig, RLOOConfig
from lowpeak.config.algorithm import Correction
from lowpeak.config.resolve import resolve_grpo, resolve_online, resolve_rloo
from lowpeak.config.resolve_vllm import COLOCATED, CORRECTION, EITHER, SERVED, resolve_vllm
from lowpeak.config.vllm import ColocateSettings, ServerSettings, VllmSettings
from lowpeak.errors import ArgumentError
from lowpeak.training.vllm_arguments import VllmArguments

SERVER = {"use_vllm": True, "vllm_mode": "server"}


def config(tmp_path, kind=GRPOConfig, **changes):
    return kind(output_dir=str(tmp_path), use_cpu=True, **changes)


def settings(tmp_path, world_size=1, **changes):
    args = config(tmp_path, per_device_train_batch_size=8, **changes)
    return resolve_online(args, world_size, 1).vllm


def test_every_argument_of_vllm_says_where_it_acts():
    listed = [*EITHER, *COLOCATED, *SERVED, *CORRECTION, "use_vllm"]
    assert sorted(listed) == sorted(field.name for field in fields(VllmArguments))


def test_without_vllm_there_are_no_settings_and_with_it_trls_defaults(tmp_path):
    assert settings(tmp_path) is None
    assert settings(tmp_path, use_vllm=True) == VllmSettings(ColocateSettings(), wave_timeout=3600.0)
    served = settings(tmp_path, **SERVER)
    assert served == VllmSettings(ServerSettings(("http://127.0.0.1:8000",)), wave_timeout=3600.0)
    assert (served.mode, settings(tmp_path, use_vllm=True).mode) == ("server", "colocate")


def test_a_colocated_engine_takes_its_share_its_lengths_and_its_ranks(tmp_path):
    found = settings(
        tmp_path,
        4,
        use_vllm=True,
        vllm_gpu_memory_utilization=0.5,
        vllm_max_model_length=4096,
        vllm_tensor_parallel_size=2,
        vllm_model_impl="transformers",
        vllm_enable_sleep_mode=True,
        vllm_engine_kwargs='{"enforce_eager": true}',
        vllm_adapters=False,
    )
    assert not found.adapters
    assert found.where == ColocateSettings(2, 0.5, 4096, "transformers", True, None, {"enforce_eager": True})


def test_a_colocated_engine_has_a_cache_of_so_many_bytes_or_a_share_of_its_device(tmp_path):
    assert settings(tmp_path, use_vllm=True, kv_cache_bytes=1 << 20).where == ColocateSettings(kv_cache_bytes=1 << 20)
    with pytest.raises(ArgumentError, match=r"=0\.5 has no effect: kv_cache_bytes=1048576 is the size"):
        settings(tmp_path, use_vllm=True, kv_cache_bytes=1 << 20, vllm_gpu_memory_utilization=0.5)


@pytest.mark.parametrize(
    ("said", "urls"),
    [
        ({"vllm_server_host": "node7", "vllm_server_port": 8011}, ("http://node7:8011",)),
        ({"vllm_server_host": "::1"}, ("http://[::1]:8000",)),
        ({"vllm_server_base_url": "http://a:1/, https://b:2"}, ("http://a:1", "https://b:2")),
        ({"vllm_server_base_url": ["http://a:1", "http://b:2"]}, ("http://a:1", "http://b:2")),
    ],
)
def test_servers_are_named_by_url_or_by_host_and_port(tmp_path, said, urls):
    assert settings(tmp_path, **SERVER, **said).where.base_urls == urls


def test_a_server_has_its_time_its_port_and_its_token(tmp_path):
    said = {"vllm_server_timeout": 30.0, "vllm_group_port": 4000, "vllm_server_token": "secret"}
    found = settings(tmp_path, **SERVER, **said)
    assert found.where == ServerSettings(("http://127.0.0.1:8000",), 30.0, "secret", 4000)
    args = config(tmp_path, **SERVER)
    assert resolve_vllm(args, 1, {"LOWPEAK_SERVER_TOKEN": "key"}).where.token == "key"
    assert resolve_vllm(args, 1, {}).where.token is None
    assert "secret" not in str(config(tmp_path, **SERVER, vllm_server_token="secret").to_dict())


def test_adapters_can_be_turned_off_for_servers_too(tmp_path):
    assert settings(tmp_path, **SERVER).adapters
    assert not settings(tmp_path, **SERVER, vllm_adapters=False).adapters


def test_weights_waves_and_completions_are_said_for_both_modes(tmp_path):
    said = {
        "vllm_batch_size": 7,
        "vllm_wave_timeout": 9.0,
        "vllm_bucket_size": "2MiB",
        "vllm_verify_weights": False,
        "vllm_adapters": False,
    }
    more = {"vllm_structured_outputs_regex": "[0-9]+", "generation_kwargs": {"seed": 3, "min_tokens": 2}}
    for mode, transport in (("colocate", "process"), ("server", "tcp")):
        found = settings(tmp_path, use_vllm=True, vllm_mode=mode, vllm_transport=transport, **said, **more)
        assert (found.batch_size, found.wave_timeout, found.bucket_bytes, found.transport) == (
            7,
            9.0,
            2 << 20,
            transport,
        )
        assert (found.verify, found.adapters, found.structured_regex) == (False, False, "[0-9]+")
        assert found.sampling_kwargs == {"min_tokens": 2}


@pytest.mark.parametrize("name", [*EITHER, *COLOCATED, *SERVED, *CORRECTION])
def test_without_vllm_each_of_its_arguments_raises(tmp_path, name):
    with pytest.raises(
        ArgumentError, match=f"{name}=.* has no effect: use_vllm is off; set use_vllm=True or remove it"
    ):
        settings(tmp_path, **{name: OTHERWISE[name]})


@pytest.mark.parametrize("name", COLOCATED)
def test_what_a_server_decides_itself_raises(tmp_path, name):
    with pytest.raises(
        ArgumentError, match=rf"{name}=.*: a server decides it where it is started: give it to `lowpeak serve`"
    ):
        settings(tmp_path, **SERVER, **{name: OTHERWISE[name]})


@pytest.mark.parametrize("name", SERVED)
def test_what_concerns_servers_raises_in_a_colocated_run(tmp_path, name):
    with pytest.raises(ArgumentError, match=f"{name}=.*vllm_mode is 'colocate', there is no server"):
        settings(tmp_path, use_vllm=True, **{name: OTHERWISE[name]})


OTHERWISE = {
    "vllm_mode": "server",
    "vllm_batch_size": 4,
    "vllm_structured_outputs_regex": "a+",
    "vllm_bucket_size": "1MiB",
    "vllm_transport": "tcp",
    "vllm_verify_weights": False,
    "vllm_adapters": False,
    "vllm_model_impl": "transformers",
    "vllm_enable_sleep_mode": True,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 1024,
    "vllm_tensor_parallel_size": 2,
    "vllm_engine_kwargs": {"enforce_eager": True},
    "vllm_server_base_url": "http://a:1",
    "vllm_server_host": "a",
    "vllm_server_port": 1,
    "vllm_server_timeout": 1.0,
    "vllm_group_port": 1,
    "vllm_server_token": "t",
    "vllm_wave_timeout": 1.0,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_tensor_parallel_size": 3}, "=3 does not divide the run's 4 ranks: .* use 1 or 2 or 4, or vllm_mode='server'"),
        ({"vllm_max_model_length": 512}, "=512 leaves no room for a prompt beside max_completion_length=512"),
        ({"vllm_transport": "nccl"}, "vllm_transport='nccl' cannot act with vllm_mode='colocate'"),
        ({"vllm_mode": "server", "vllm_transport": "process"}, "a server is another process; use auto"),
        ({"vllm_mode": "server", "kv_cache_bytes": 1 << 20}, "kv_cache_bytes=1048576 has no effect: a server has a KV cache"),
        ({"vllm_mode": "server", "vllm_server_base_url": "a:1"}, "'a:1', which is no URL of a server"),
        ({"vllm_mode": "server", "vllm_server_base_url": "http://a:1,http://a:1/"}, "must name each server once"),
        ({"vllm_mode": "server", "vllm_server_base_url": []}, "must name each server once, at least one"),
        ({"vllm_mode": "server", "vllm_server_base_url": "http://a:1", "vllm_server_port": 2}, "says where it is"),
        ({"vllm_mode": "server", "vllm_server_base_url": "http://a:banana"}, "'http://a:banana', which is no URL of a server"),
        ({"vllm_mode": "server", "vllm_server_base_url": "http://a:99999"}, "'http://a:99999', which is no URL of a server"),
        ({"vllm_mode": "server", "vllm_server_base_url": "http://a b:1"}, "'http://a b:1', which is no URL of a server"),
        ({"vllm_mode": "server", "vllm_server_host": "http://a"}, "vllm_server_host='http://a' is no name or address of a host"),
        ({"vllm_mode": "server", "vllm_server_host": "a b"}, "vllm_server_host='a b' is no name or address of a host"),
        ({"vllm_mode": "server", "offload_during_rollout": True}, "servers generate on devices of their own"),
        ({"vllm_bucket_size": "64 sheep"}, "vllm_bucket_size='64 sheep' must be a number of bytes above 0"),
        ({"vllm_bucket_size": 0}, "must be a number of bytes above 0"),
        ({"gather_budget": "8GiB"}, "gather_budget='8GiB' cannot act: vLLM generates with weights of its own"),
        ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation=False cannot act"),
        ({"generation_kwargs": {"banana": 4}}, "generation_kwargs has banana, which vLLM does not take; it takes seed"),
        ({"generation_kwargs": {"ignore_eos": True}}, "generation_kwargs has ignore_eos: a completion ends with the tokenizer's"),
        ({"generation_kwargs": {"repetition_detection": {}}}, "generation_kwargs has repetition_detection: a completion ends"),
        ({"generation_kwargs": {"logit_bias": {"a": 1}}}, "logit_bias={'a': 1}, which is no mapping of token ids to numbers"),
        ({"generation_kwargs": {"logit_bias": {"1": "x"}}}, "logit_bias={'1': 'x'}, which is no mapping of token ids to numbers"),
        ({"generation_kwargs": {"logit_bias": {"1": None}}}, "logit_bias={'1': None}, which is no mapping of token ids to numbers"),
        ({"vllm_mode": "server", "vllm_max_model_length": 512}, "=512 leaves no room for a prompt beside"),
        ({"generation_kwargs": {"n": 4}}, "generation_kwargs has n: say it as num_generations"),
        ({"generation_kwargs": {"logprobs": 4}}, "generation_kwargs has logprobs, which lowpeak sets itself"),
        ({"vllm_engine_kwargs": {"tensor_parallel_size": 2}}, "vllm_engine_kwargs has tensor_parallel_size: say it as vllm_tens"),
        ({"vllm_engine_kwargs": {"load_format": "auto"}}, "vllm_engine_kwargs has load_format, which lowpeak sets itself"),
        ({"vllm_engine_kwargs": "banana"}, "vllm_engine_kwargs is not a JSON object"),
        ({"vllm_engine_kwargs": "[1]"}, "vllm_engine_kwargs is not a JSON object"),
        ({"vllm_mode": "sever"}, "must be one of 'colocate', 'server'"),
        ({"vllm_structured_outputs_regex": ""}, "vllm_structured_outputs_regex='' must be a pattern"),
        ({"vllm_server_port": 70000}, "must be a port"),
        ({"vllm_gpu_memory_utilization": 1.5}, r"must be in \(0, 1\]"),
        ({"vllm_importance_sampling_mode": "cap"}, "must be one of 'token_truncate', 'token_mask'"),
    ],
)  # fmt: skip
def test_what_cannot_act_with_vllm_raises_with_the_remedy(tmp_path, changes, words):
    with pytest.raises(ArgumentError, match=words):
        settings(tmp_path, 4, use_vllm=True, **changes)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_with_expandable_segments_does_not_go_with_sleeping_engines(tmp_path, name):
    environ = {name: "max_split_size_mb:64, expandable_segments: True"}
    sleeping = config(tmp_path, use_vllm=True, vllm_enable_sleep_mode=True)
    with pytest.raises(ArgumentError, match=f"{name} has expandable_segments:True.*Take it out of the environment"):
        resolve_vllm(sleeping, 1, environ)
    assert resolve_vllm(sleeping, 1, {name: "expandable_segments:False"}).where.sleeps
    assert resolve_vllm(config(tmp_path, use_vllm=True), 1, environ) is not None


def correction(tmp_path, kind=GRPOConfig, resolve=resolve_grpo, **changes):
    args = config(tmp_path, kind, **changes)
    return resolve(args, resolve_online(args, 1, 1)).correction


def test_the_correction_is_trls_with_vllm_and_none_without(tmp_path):
    assert correction(tmp_path) is None
    assert correction(tmp_path, use_vllm=True) == Correction(True, True, None, 3.0)
    assert correction(tmp_path, RLOOConfig, resolve_rloo, use_vllm=True) == Correction(True, True, None, 3.0)
    assert correction(tmp_path, use_vllm=True, vllm_importance_sampling_correction=False) is None


@pytest.mark.parametrize(
    ("mode", "per_sequence", "masks"),
    [
        ("token_truncate", False, False),
        ("token_mask", False, True),
        ("sequence_truncate", True, False),
        ("sequence_mask", True, True),
    ],
)
def test_the_correction_has_four_modes_and_two_bounds(tmp_path, mode, per_sequence, masks):
    bounds = {"vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": 0.5}
    found = correction(tmp_path, use_vllm=True, vllm_importance_sampling_mode=mode, **bounds)
    assert found == Correction(per_sequence, masks, 0.5, 2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"correction": False, "mode": "token_mask"}, "mode='token_mask' has no effect: .*correction is off"),
        ({"correction": False, "clip_max": 2.0}, "clip_max=2.0 has no effect"),
        ({"clip_min": 3.0}, "clip_min=3.0 must be below vllm_importance_sampling_clip_max=3.0"),
        ({"mode": "token_truncate", "clip_max": None}, "cuts weights to their bounds, and there is none"),
    ],
)
def test_a_correction_that_corrects_nothing_raises(tmp_path, changes, words):
    named = {f"vllm_importance_sampling_{name}": value for name, value in changes.items()}
    with pytest.raises(ArgumentError, match=words):
        correction(tmp_path, use_vllm=True, **named)


def test_rloo_is_corrected_by_the_completion(tmp_path):
    with pytest.raises(ArgumentError, match=r"RLOO's ratio and loss are of whole completions; use sequence_mask"):
        correction(tmp_path, RLOOConfig, resolve_rloo, use_vllm=True, vllm_importance_sampling_mode="token_mask")


def test_trls_older_name_of_the_bound_is_told_the_newer_one(tmp_path):
    with pytest.raises(
        ArgumentError, match=r"vllm_importance_sampling_cap.*its name is vllm_importance_sampling_clip_max"
    ):
        config(tmp_path, vllm_importance_sampling_cap=2.0)
