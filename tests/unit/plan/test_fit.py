"""The choice of settings that fit: what is kept without need, what changes when memory is short, and what would make a run fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from transformers import Qwen2Config

from lowpeak import GRPOConfig
from lowpeak.memory import Kind
from lowpeak.plan import GIB, Fit, Machine, PlanRequest, Search, make_plan

MODEL = Qwen2Config(
    vocab_size=8_192, hidden_size=1_024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    intermediate_size=4_096, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip


def request(memory: float, devices: int = 1, **arguments: object) -> PlanRequest:
    args = GRPOConfig(
        output_dir="unused", use_cpu=True, num_generations=8,
        **{"per_device_train_batch_size": 8, "max_completion_length": 64, **arguments},
    )  # fmt: skip
    return PlanRequest("grpo", args, MODEL, Machine(devices, int(memory * GIB)), prompt_tokens=64)


@cache
def fit(memory: float, devices: int = 1) -> Fit:
    return Search(request(memory, devices)).run()


def test_with_room_the_runs_format_stays_and_nothing_is_recomputed():
    found = fit(80)
    assert found.candidate.storage is None
    assert not found.candidate.checkpointing
    assert found.plan.fits


def test_with_little_room_the_run_takes_fewer_bytes_per_parameter():
    found = fit(3)
    assert found.candidate.storage is not None
    assert found.plan.peak <= 3 * GIB
    assert any(candidate.storage is None for candidate, _ in found.rejected)
    assert found.arguments["weight_bits"] in (16, 32)


def test_another_package_is_not_needed_without_gain():
    assert fit(80, 2).candidate.strategy in ("ddp", "fsdp2", "tp")


def test_tensor_parallelism_keeps_the_sequences_of_a_step():
    search = Search(request(80, 4))
    for candidate in search._candidates():
        applied, _ = search._apply(candidate, {})
        assert applied.args.per_device_train_batch_size * applied.world_size == 8 * 4


def test_what_is_given_stays():
    asked = request(80, micro_batch_tokens=512, gradient_checkpointing=True)
    found = Search(asked).run()
    assert found.candidate.tokens == 512
    assert found.candidate.checkpointing
    assert not {"micro_batch_tokens", "gradient_checkpointing"} & set(found.arguments)


def test_the_plan_of_the_choice_is_that_of_its_arguments():
    found = fit(3)
    again = make_plan(found.plan.request)
    assert {name: phase.peak for name, phase in again.phases.items()} == {
        name: phase.peak for name, phase in found.plan.phases.items()
    }


def test_a_run_that_cannot_fit_is_told_the_smallest_change():
    found = Search(request(1.0)).run()
    assert found.plan is None
    assert "--gpus" in found.smallest_change or "--use_peft" in found.smallest_change
    assert found.rejected


def test_calibration_multiplies_the_seconds_of_its_phases():
    plan = fit(80).plan
    doubled = plan.calibrated({"train": 2.0})
    assert doubled.seconds["train"] == pytest.approx(2 * plan.seconds["train"])
    assert replace(doubled, seconds=plan.seconds) == plan


FEW_CANDIDATES = {"weight_bits": 32, "micro_batch_tokens": 512, "gradient_checkpointing": True}
COLOCATED = {**FEW_CANDIDATES, "use_vllm": True, "vllm_mode": "colocate"}


def test_the_sizes_of_a_rollout_are_chosen_for_the_run():
    found = fit(80, 2)
    sizes = found.plan.sizes
    assert {name: found.arguments[name] for name in ("kv_cache_bytes", "logprob_chunk_size")} == {
        "kv_cache_bytes": sizes["kv_cache_bytes"], "logprob_chunk_size": sizes["logprob_chunk_size"]
    }  # fmt: skip
    assert (
        found.arguments["gather_budget"] == 2 * found.plan.counts.total // 2**20 * 2**20
    )  # there is room for all of it


def test_with_less_memory_a_rollout_moves_optimizer_states_away_or_has_a_smaller_cache():
    many = {**FEW_CANDIDATES, "max_completion_length": 1024, "per_device_train_batch_size": 64}
    moving = Search(request(2.2, **many)).run()
    staying = Search(request(2.2, offload_during_rollout=False, **many)).run()
    assert moving.arguments["offload_during_rollout"] is True
    assert staying.arguments["kv_cache_bytes"] < moving.arguments["kv_cache_bytes"]
    assert staying.plan.seconds["rollout"] > moving.plan.seconds["rollout"]


@pytest.mark.parametrize(("memory", "sleeps", "offloads"), [(16, False, False), (4.6, True, False), (4.4, True, True)])
def test_vllm_gets_the_share_that_training_leaves_and_sleeps_if_that_is_too_little(memory, sleeps, offloads):
    found = Search(request(memory, **COLOCATED)).run()
    assert found.arguments["vllm_enable_sleep_mode"] is sleeps
    assert ("offload_during_rollout" in found.arguments) is offloads
    share = found.arguments["vllm_gpu_memory_utilization"]
    assert found.plan.phases["rollout"].device[Kind.ENGINE] == int(share * int(memory * GIB))
    assert found.plan.fits


def test_vllm_spans_devices_if_that_is_faster_unless_its_share_and_size_are_given():
    found = Search(request(80, 2, **COLOCATED)).run()
    assert found.arguments["vllm_tensor_parallel_size"] in (1, 2)
    given = {"vllm_gpu_memory_utilization": 0.4, "vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False}
    kept = Search(request(80, 2, **COLOCATED, **given)).run()
    assert not given.keys() & kept.arguments.keys()
    assert kept.plan.phases["rollout"].device[Kind.ENGINE] == int(0.4 * 80 * GIB)


def test_the_reference_leaves_the_device_if_it_has_no_room():
    found = Search(request(2.0, beta=0.1, **FEW_CANDIDATES)).run()
    assert found.arguments["offload_frozen_models"] is True
    frozen = {name: phase.device.get(Kind.FROZEN, 0) for name, phase in found.plan.phases.items()}
    assert 0 < frozen["score"] < found.plan.phases["backward"].host[Kind.FROZEN]
    assert frozen["backward"] == 0


def test_activations_leave_the_device_if_nothing_else_helps():
    found = Search(request(2.05, max_completion_length=2048, **FEW_CANDIDATES)).run()
    assert found.arguments["activation_offloading"] is True
    assert found.plan.phases["backward"].host[Kind.ACTIVATIONS] > 0


def test_too_little_host_memory_is_the_reason_that_is_named():
    asked = request(80, **FEW_CANDIDATES)
    found = Search(replace(asked, machine=replace(asked.machine, host_memory=1 << 20))).run()
    assert "of a host's memory of 1 MiB" in found.smallest_change
