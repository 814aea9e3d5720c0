"""The arguments of vLLM, resolved; `test_arguments_validation.py` has those without effect."""

from __future__ import annotations

import pytest
from packaging.version import Version

from lowpeak import GRPOConfig, PPOConfig, RLOOConfig
from lowpeak.arguments import vllm as vllm_arguments
from lowpeak.arguments.correction import Correction
from lowpeak.arguments.grpo import resolve_grpo
from lowpeak.arguments.online import resolve_online
from lowpeak.arguments.ppo import resolve_ppo
from lowpeak.arguments.rloo import resolve_rloo
from lowpeak.arguments.validation import reset_idle_arguments
from lowpeak.arguments.vllm import ColocateSettings, ServerSettings, VllmSettings, resolve_vllm
from lowpeak.errors import ArgumentError

SERVER = {"use_vllm": True, "vllm_mode": "server"}


def config(tmp_path, kind=GRPOConfig, **changes):
    return kind(output_dir=str(tmp_path), use_cpu=True, **changes)


def settings(tmp_path, world_size=1, **changes):
    args = config(tmp_path, per_device_train_batch_size=8, **changes)
    return resolve_online(args, world_size, 1).vllm


def test_without_vllm_there_are_no_settings_and_with_it_trls_defaults(tmp_path):
    assert settings(tmp_path) is None
    assert settings(tmp_path, use_vllm=True) == VllmSettings(ColocateSettings(), wave_timeout=3600.0)
    served = settings(tmp_path, **SERVER)
    assert served == VllmSettings(ServerSettings(("http://127.0.0.1:8000",)), wave_timeout=3600.0)
    assert served.adapters
    assert (served.mode, settings(tmp_path, use_vllm=True).mode) == ("server", "colocate")


def test_a_colocated_engine_takes_its_share_its_lengths_and_its_ranks(tmp_path):
    arguments = {
        "vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 4096, "vllm_tensor_parallel_size": 2,
        "vllm_model_impl": "transformers", "vllm_enable_sleep_mode": True, "vllm_engine_kwargs": '{"enforce_eager": true}',
    }  # fmt: skip
    found = settings(tmp_path, 4, use_vllm=True, **arguments).where
    assert found == ColocateSettings(2, 0.5, 4096, "transformers", True, None, {"enforce_eager": True})
    assert settings(tmp_path, use_vllm=True, kv_cache_bytes=1 << 20).where == ColocateSettings(kv_cache_bytes=1 << 20)


@pytest.mark.parametrize(
    ("arguments", "urls"),
    [
        ({"vllm_server_host": "node7", "vllm_server_port": 8011}, ("http://node7:8011",)),
        ({"vllm_server_host": "::1"}, ("http://[::1]:8000",)),
        ({"vllm_server_base_url": "http://a:1/, https://b:2"}, ("http://a:1", "https://b:2")),
        ({"vllm_server_base_url": ["http://a:1", "http://b:2"]}, ("http://a:1", "http://b:2")),
    ],
)
def test_servers_are_named_by_url_or_by_host_and_port(tmp_path, arguments, urls):
    assert settings(tmp_path, **SERVER, **arguments).where.base_urls == urls


def test_a_server_has_its_time_its_port_and_its_token(tmp_path):
    arguments = {"vllm_server_timeout": 30.0, "vllm_group_port": 4000, "vllm_server_token": "secret"}
    found = settings(tmp_path, **SERVER, **arguments)
    assert found.where == ServerSettings(("http://127.0.0.1:8000",), 30.0, "secret", 4000)
    args = config(tmp_path, **SERVER)
    assert resolve_vllm(args, 1, {"LOWPEAK_SERVER_TOKEN": "key"}).where.token == "key"
    assert resolve_vllm(args, 1, {}).where.token is None
    assert "secret" not in str(config(tmp_path, **SERVER, vllm_server_token="secret").to_dict())


def test_weights_waves_and_completions_are_said_for_both_modes(tmp_path):
    arguments = {
        "vllm_batch_size": 7, "vllm_wave_timeout": 9.0, "vllm_bucket_size": "2MiB", "vllm_verify_weights": False,
        "vllm_adapters": False, "vllm_structured_outputs_regex": "[0-9]+",
        "generation_kwargs": {"seed": 3, "min_tokens": 2, "logit_bias": {"7": 1}},
    }  # fmt: skip
    for mode, transport in (("colocate", "process"), ("server", "tcp")):
        found = settings(tmp_path, use_vllm=True, vllm_mode=mode, vllm_transport=transport, **arguments)
        more = {"logit_bias": {7: 1.0}}
        assert found == VllmSettings(found.where, 7, 9.0, 2 << 20, transport, False, False, "[0-9]+", more)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"vllm_tensor_parallel_size": 3}, "vllm_tensor_parallel_size=3 .* 1 or 2 or 4"),
        ({"vllm_max_model_length": 512}, "vllm_max_model_length=512 .*max_completion_length=512"),
        ({"vllm_max_model_length": 512, "vllm_mode": "server"}, "vllm_max_model_length=512"),
        ({"vllm_transport": "nccl"}, "vllm_transport='nccl' .*vllm_mode='colocate'"),
        ({"vllm_transport": "process", "vllm_mode": "server"}, "vllm_transport='process' .*vllm_mode='server'"),
        *(({"vllm_server_base_url": url, "vllm_mode": "server"}, f"vllm_server_base_url=.*{shown}") for url, shown in (
            ("a:1", "'a:1'"), ("http://a:1,http://a:1/", "http://a:1"), ([], ""), ("http://a:banana", "banana"),
            ("http://a:99999", "99999"), ("http://a b:1", "a b"), ("ftp://a", "'ftp://a'"),
            ("http://", "'http:"), ("http://[::1", "'http:"), ("http://a\x00", "a"), ("http://é..b", "é"),
            ("http://1.2.3.999", "999"), (8000, "8000"))),
        *(({"vllm_server_host": host, "vllm_mode": "server"}, f"vllm_server_host='{host}'") for host in ("http://a", "a b")),
        *(({"vllm_bucket_size": size}, f"vllm_bucket_size={size!r}") for size in ("64 sheep", 0, "1.5")),
        *(({"generation_kwargs": {name: 4}}, f"generation_kwargs.*{pattern}") for name, pattern in (
            ("banana", "banana.*min_tokens"), ("ignore_eos", "max_completion_length"), ("n", "num_generations"),
            ("repetition_detection", "repetition_detection"), ("logprobs", "logprobs"))),
        *(({"generation_kwargs": {"logit_bias": bias}}, "generation_kwargs.*logit_bias=") for bias in (
            {"a": 1}, {"1": "x"}, {"1": None})),
        *(({"vllm_engine_kwargs": arguments}, f"vllm_engine_kwargs.*{pattern}") for arguments, pattern in (
            ({"tensor_parallel_size": 2}, "vllm_tensor_parallel_size"), ({"load_format": "auto"}, "load_format"), ("banana", ""),
            ("[1]", ""))),
        ({"vllm_mode": "sever"}, "vllm_mode='sever'.*'colocate', 'server'"),
        ({"vllm_structured_outputs_regex": ""}, "vllm_structured_outputs_regex=''"),
        ({"vllm_server_port": 70000}, "vllm_server_port=70000"),
        ({"vllm_gpu_memory_utilization": 1.5}, r"vllm_gpu_memory_utilization=1\.5"),
        ({"vllm_importance_sampling_mode": "cap"}, "vllm_importance_sampling_mode='cap'.*'token_truncate'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_contradicts_itself_or_is_out_of_range_raises(tmp_path, changes, pattern):
    with pytest.raises(ArgumentError, match=pattern):
        settings(tmp_path, 4, use_vllm=True, **changes)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_with_expandable_segments_does_not_go_with_sleeping_engines_of_old_vllm(
    tmp_path, name, monkeypatch
):
    monkeypatch.setattr(vllm_arguments, "installed_vllm", lambda: Version("0.31.1"))
    environ = {name: "max_split_size_mb:64, expandable_segments: True"}
    sleeping = config(tmp_path, use_vllm=True, vllm_enable_sleep_mode=True)
    with pytest.raises(ArgumentError, match=f"{name}.*expandable_segments:True"):
        resolve_vllm(sleeping, 1, environ)
    assert resolve_vllm(sleeping, 1, {name: "expandable_segments:False"}).where.sleeps
    assert resolve_vllm(config(tmp_path, use_vllm=True), 1, environ) is not None
    monkeypatch.setattr(vllm_arguments, "installed_vllm", lambda: Version("0.32.0"))
    assert resolve_vllm(sleeping, 1, environ).where.sleeps


def correction(tmp_path, kind=GRPOConfig, resolve=resolve_grpo, **changes):
    args = config(tmp_path, kind, **changes)
    online = resolve_online(args, 1, 1)
    return resolve(reset_idle_arguments(args, online.facts), online).correction


RLOO = (RLOOConfig, resolve_rloo)
BOUNDS = {"clip_max": 2.0, "clip_min": 0.5}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ((), {}, Correction(True, True, None, 3.0)),
        (RLOO, {}, Correction(True, True, None, 3.0)),
        ((), {"correction": False}, None),
        ((), {"mode": "token_truncate", **BOUNDS}, Correction(False, False, 0.5, 2.0)),
        ((), {"mode": "token_mask", **BOUNDS}, Correction(False, True, 0.5, 2.0)),
        ((), {"mode": "sequence_truncate", **BOUNDS}, Correction(True, False, 0.5, 2.0)),
        ((), {"mode": "sequence_mask", **BOUNDS}, Correction(True, True, 0.5, 2.0)),
        ((), {"mode": "sequence_geometric_mask"}, Correction(True, True, 0.99, 1.01, True)),
        ((), {"mode": "sequence_geometric_mask", **BOUNDS}, Correction(True, True, 0.5, 2.0, True)),
        ((), {"clip_min": 3.0}, r"clip_min=3\.0 .*clip_max=3\.0"),
        ((), {"mode": "token_truncate", "clip_max": None}, "mode='token_truncate'.*clip_max"),
        (RLOO, {"mode": "token_mask"}, "vllm_importance_sampling_mode='token_mask'.*sequence_mask"),
        ((), {"cap": 2.0}, Correction(True, True, None, 2.0)),  # TRL's older name of clip_max
        ((), {"cap": 2.0, "clip_max": 2.5}, "vllm_importance_sampling_cap.*vllm_importance_sampling_clip_max"),
    ],
    ids=lambda part: part[0].__name__ if isinstance(part, tuple) and part else str(part),
)
def test_the_correction_is_trls_in_four_modes_with_bounds_that_bind(tmp_path, kind, changes, expected):
    named = {f"vllm_importance_sampling_{name}": value for name, value in changes.items()}
    if not isinstance(expected, str):
        assert correction(tmp_path, *kind, use_vllm=True, **named) == expected
        assert correction(tmp_path, *kind) is None
        return
    with pytest.raises(ArgumentError, match=expected):
        correction(tmp_path, *kind, use_vllm=True, **named)


STALE = {**SERVER, "max_staleness": 1}


@pytest.mark.parametrize(
    ("kind", "changes", "old_policy", "expected"),
    [
        ((), {}, "sampler", None),
        ((), {"vllm_importance_sampling_mode": "sequence_geometric_mask"}, "sampler", Correction(True, True, 0.99, 1.01, True)),
        ((), {"vllm_importance_sampling_correction": False}, "sampler", None),
        ((), {"old_policy": "policy"}, "policy", Correction(False, False, None, 2.0)),
        ((), {"old_policy": "policy", "vllm_importance_sampling_mode": "sequence_mask"}, "policy",
         Correction(True, True, None, 3.0)),
        ((), {"old_policy": "policy", "vllm_importance_sampling_cap": 3.0}, "policy", Correction(False, False, None, 3.0)),
        ((), {"importance_sampling_level": "sequence", "num_iterations": 2}, "policy", Correction(True, False, None, 3.0)),
        ((), {"importance_sampling_level": "sequence"}, "policy", Correction(True, False, None, 3.0)),
        ((), {"vllm_importance_sampling_mode": "sequence_geometric_mask", "vllm_importance_sampling_clip_max": 3.0}, "sampler",
         Correction(True, True, 0.99, 3.0, True)),
        (RLOO, {"old_policy": "sampler"}, "policy", Correction(True, False, None, 3.0)),
        (RLOO, {}, "policy", Correction(True, False, None, 3.0)),
        ((PPOConfig, resolve_ppo), {}, "sampler", None),
    ],
)  # fmt: skip
def test_stale_rollouts_are_clipped_around_the_sampler_or_truncated(tmp_path, kind, changes, old_policy, expected):
    kind, resolve = kind or (GRPOConfig, resolve_grpo)
    args = config(tmp_path, kind, **STALE, **changes)
    online = resolve_online(args, 1, 1)
    found = resolve(reset_idle_arguments(args, online.facts), online)
    assert (found.old_policy, found.correction, online.max_staleness) == (old_policy, expected, 1)


class _GroupMade(Exception):
    pass


@pytest.mark.parametrize("mode", ["colocate", "server"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 3900),
        ({"vllm_wave_timeout": 7200.5}, 7501),
        ({"vllm_wave_timeout": 60.0}, 1800),
        ({"ddp_timeout": 4000}, 4000),
        ({"ddp_timeout": 9000, "vllm_wave_timeout": None}, 9000),
        ({"use_vllm": False}, 1800),
        ({"ddp_timeout": 3600}, r"vllm_wave_timeout=3600\.0 .*ddp_timeout=3600,.*ddp_timeout to 3900"),
        ({"vllm_wave_timeout": None}, "vllm_wave_timeout=None .*ddp_timeout=1800 "),
        ({"vllm_wave_timeout": "1h"}, "vllm_wave_timeout='1h'"),
    ],
    ids=str,
)
def test_ranks_wait_longer_for_each_other_than_a_wave_may_take(tmp_path, monkeypatch, mode, changes, expected):
    def make_group(seconds, backend):
        raise _GroupMade(seconds)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("lowpeak.trainers.configs.limit_collectives_on_cpu", make_group)
    error, match = (ArgumentError, expected) if isinstance(expected, str) else (_GroupMade, f"^{expected}$")
    with pytest.raises(error, match=match):
        config(tmp_path, **{"use_vllm": True, "vllm_mode": mode, **changes})


def test_a_single_process_keeps_its_timeouts(tmp_path):
    assert config(tmp_path, use_vllm=True).ddp_timeout == 1800
