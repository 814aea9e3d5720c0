"""The choice of settings that fit: what is kept without need, what changes when memory is short, and what would make a run fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from transformers import Qwen2Config, Qwen3MoeConfig

from lowpeak import GRPOConfig, RewardConfig, SFTConfig
from lowpeak.errors import ArgumentError
from lowpeak.memory.usage import Kind
from lowpeak.plan.fit import Fit, Search
from lowpeak.plan.hardware import GIB, Machine
from lowpeak.plan.plan import make_plan
from lowpeak.plan.quick_plans import apply_candidate
from lowpeak.plan.request import PlanRequest

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


@pytest.mark.release
def test_with_room_the_runs_format_stays_and_nothing_is_recomputed():
    found = fit(80)
    assert found.candidate.storage is None
    assert not found.candidate.checkpointing
    assert found.plan.fits


@pytest.mark.extended
def test_with_little_room_the_run_takes_fewer_bytes_per_parameter():
    found = fit(3)
    assert found.candidate.storage is not None
    assert found.plan.peak <= 3 * GIB
    assert any(candidate.storage is None for candidate, _ in found.rejected)
    assert found.arguments["weight_bits"] in (16, 32)


@pytest.mark.release
def test_another_package_is_not_needed_without_gain():
    assert fit(80, 2).candidate.strategy in ("ddp", "fsdp2", "tp")


def test_tensor_parallelism_keeps_the_sequences_of_a_step():
    search = Search(request(80, 4))
    for candidate in search._candidates():
        applied, _ = apply_candidate(search._request, candidate, {})
        assert applied.args.per_device_train_batch_size * applied.world_size == 8 * 4


@pytest.mark.release
def test_what_is_given_stays():
    run_request = request(80, micro_batch_tokens=512, gradient_checkpointing=True)
    found = Search(run_request).run()
    assert found.candidate.tokens == 512
    assert found.candidate.checkpointing
    assert not {"micro_batch_tokens", "gradient_checkpointing"} & set(found.arguments)


@pytest.mark.release
def test_the_plan_of_the_choice_is_that_of_its_arguments():
    found = fit(3)
    again = make_plan(found.plan.request)
    assert {name: phase.peak for name, phase in again.phases.items()} == {
        name: phase.peak for name, phase in found.plan.phases.items()
    }


@pytest.mark.release
@pytest.mark.processes
def test_a_run_that_cannot_fit_is_told_the_smallest_change():
    found = Search(request(1.0)).run()
    assert found.plan is None
    assert "--gpus" in found.smallest_change or "--use_peft" in found.smallest_change
    assert found.rejected


@pytest.mark.release
def test_calibration_multiplies_the_seconds_of_its_phases():
    plan = fit(80).plan
    doubled = plan.calibrated({"train": 2.0})
    assert doubled.seconds["train"] == pytest.approx(2 * plan.seconds["train"])
    assert replace(doubled, seconds=plan.seconds) == plan


FEW_CANDIDATES = {"weight_bits": 32, "micro_batch_tokens": 512, "gradient_checkpointing": True}
COLOCATED = {**FEW_CANDIDATES, "use_vllm": True, "vllm_mode": "colocate"}


@pytest.mark.release
def test_the_sizes_of_a_rollout_are_chosen_for_the_run():
    found = fit(80, 2)
    sizes = found.plan.sizes
    assert {name: found.arguments[name] for name in ("kv_cache_bytes", "logprob_chunk_size")} == {
        "kv_cache_bytes": sizes["kv_cache_bytes"], "logprob_chunk_size": sizes["logprob_chunk_size"]
    }  # fmt: skip
    assert (
        found.arguments["gather_budget"] == 2 * found.plan.counts.total // 2**20 * 2**20
    )  # there is room for all of it


@pytest.mark.release
def test_a_rollout_beyond_the_device_keeps_less_gathered_and_then_has_a_smaller_cache_of_at_least_a_sequence():
    plan = fit(80, 2).plan
    search = Search(replace(request(80, 2), machine=Machine(2, plan.peak - (3 << 20))))
    assert search._smaller({"gather_budget": 10 << 20, "kv_cache_bytes": 9 << 20}, plan) == {
        "gather_budget": 7 << 20, "kv_cache_bytes": 9 << 20
    }  # fmt: skip
    least = plan.inputs.least_cache_bytes
    assert search._smaller({"gather_budget": 0, "kv_cache_bytes": least + 1}, plan)["kv_cache_bytes"] == least
    assert search._smaller({"gather_budget": 0, "kv_cache_bytes": least}, plan) is None
    assert Search(request(80, 2))._smaller({"gather_budget": 10 << 20}, plan) is None  # the device has room


def test_a_given_cache_that_holds_no_sequence_is_refused_as_by_the_run():
    with pytest.raises(ArgumentError, match="kv_cache_bytes=4096"):
        make_plan(request(80, kv_cache_bytes=4096))


@pytest.mark.release
@pytest.mark.processes
def test_with_less_memory_a_rollout_moves_optimizer_states_away_or_has_a_smaller_cache():
    many = {**FEW_CANDIDATES, "max_completion_length": 1024, "per_device_train_batch_size": 64}
    moving = Search(request(2.05, **many)).run()
    staying = Search(request(2.05, offload_during_rollout=False, **many)).run()
    assert moving.arguments["offload_during_rollout"] is True
    assert staying.arguments["kv_cache_bytes"] < moving.arguments["kv_cache_bytes"]
    assert staying.plan.seconds["rollout"] > moving.plan.seconds["rollout"]


@pytest.mark.release
@pytest.mark.parametrize(("memory", "sleeps", "offloads"), [(16, False, False), (4.6, True, False), (4.4, True, True)])
def test_vllm_gets_the_share_that_training_leaves_and_sleeps_if_that_is_too_little(memory, sleeps, offloads):
    found = Search(request(memory, **COLOCATED)).run()
    assert found.arguments["vllm_enable_sleep_mode"] is sleeps
    assert ("offload_during_rollout" in found.arguments) is offloads
    share = found.arguments["vllm_gpu_memory_utilization"]
    assert found.plan.phases["rollout"].device[Kind.ENGINE] == int(share * int(memory * GIB))
    assert found.plan.fits


@pytest.mark.release
@pytest.mark.processes
def test_vllm_spans_devices_if_that_is_faster_unless_its_share_and_size_are_given():
    found = Search(request(80, 2, **COLOCATED)).run()
    assert found.arguments["vllm_tensor_parallel_size"] in (1, 2)
    given = {"vllm_gpu_memory_utilization": 0.4, "vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False}
    kept = Search(request(80, 2, **COLOCATED, **given)).run()
    assert not given.keys() & kept.arguments.keys()
    assert kept.plan.phases["rollout"].device[Kind.ENGINE] == int(0.4 * 80 * GIB)


@pytest.mark.release
def test_the_reference_leaves_the_device_if_it_has_no_room():
    found = Search(request(2.0, beta=0.1, **FEW_CANDIDATES)).run()
    assert found.arguments["offload_frozen_models"] is True
    frozen = {name: phase.device.get(Kind.FROZEN, 0) for name, phase in found.plan.phases.items()}
    assert 0 < frozen["score"] < found.plan.phases["backward"].host[Kind.FROZEN]
    assert frozen["backward"] == 0


@pytest.mark.release
@pytest.mark.processes
def test_activations_leave_the_device_if_nothing_else_helps():
    found = Search(request(2.05, max_completion_length=2048, **FEW_CANDIDATES)).run()
    assert found.arguments["activation_offloading"] is True
    assert found.plan.phases["backward"].host[Kind.ACTIVATIONS] > 0


@pytest.mark.release
def test_too_little_host_memory_is_the_reason_that_is_named():
    run_request = request(80, **FEW_CANDIDATES)
    found = Search(replace(run_request, machine=replace(run_request.machine, host_memory=1 << 20))).run()
    assert "of a host's memory of 1 MiB" in found.smallest_change


@pytest.mark.release
def test_quick_plans_agree_with_plans_under_every_strategy_with_and_without_checkpointing():
    search = Search(request(80, 4, beta=0.1, micro_batch_tokens=320))  # two micro-batches
    firsts = {}
    for candidate in search._candidates():
        firsts.setdefault((candidate.strategy, candidate.tensor_parallel, candidate.checkpointing), candidate)
    assert {strategy for strategy, _, _ in firsts} == {"ddp", "fsdp2", "zero2", "zero3", "tp"}
    for candidate in firsts.values():
        quick = search._planner.plan(candidate)
        plan, _ = search._rehearse(quick)
        assert plan.work.checkpointing is candidate.checkpointing
        assert quick.plan.peak == pytest.approx(plan.peak, rel=0.1), candidate
        assert quick.seconds == pytest.approx(sum(plan.seconds.values()), rel=0.1), candidate


@pytest.mark.release
def test_a_budget_is_no_smaller_device_for_vllm():
    run_request = request(80, **COLOCATED)
    found = Search(
        replace(run_request, machine=replace(run_request.machine, memory=16 * GIB, device_memory=80 * GIB))
    ).run()
    share = found.arguments["vllm_gpu_memory_utilization"]
    assert found.plan.phases["rollout"].device[Kind.ENGINE] == int(share * 80 * GIB)
    assert found.plan.peak <= 16 * GIB


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({"model_init_kwargs": {"dtype": "float32"}}, "weight_bits"),
        ({"bf16": False}, "weight_bits"),
        ({"weight_bits": 32}, "zero3"),
        ({"beta": 0.1, "offload_frozen_models": True}, "tp"),
        ({"per_device_train_batch_size": 2}, "none of them"),  # 8 completions are a group of all ranks together
    ],
)
def test_settings_that_the_run_would_refuse_are_no_candidates(given, left_out):
    candidates = list(Search(request(80, 4, **given))._candidates())
    assert candidates
    assert not any(left_out in (candidate.strategy, *candidate.arguments) for candidate in candidates)


@pytest.mark.release
def test_tensor_parallelism_is_for_models_whose_layers_it_can_split():
    experts = Qwen3MoeConfig(
        vocab_size=1_024, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=128, intermediate_size=256, dtype="bfloat16",
    )  # fmt: skip
    strategies = {
        name: {candidate.tensor_parallel for candidate in Search(replace(request(80, 4), config=config))._candidates()}
        for name, config in {"experts": experts, "dense": MODEL}.items()
    }
    assert strategies == {"experts": {1}, "dense": {1, 2}}  # two key-value heads


def test_a_given_placement_stays():
    run_request = replace(request(80, 4), strategy="zero3")
    assert {each.strategy for each in Search(run_request, keeps_strategy=True)._candidates()} == {"zero3"}
    with pytest.raises(ArgumentError, match="fsdp2-offload"):
        Search(replace(run_request, strategy="fsdp2-offload"), keeps_strategy=True)


@pytest.mark.release
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_supervised_runs_have_a_fit_on_several_devices(kind):
    config = {"sft": SFTConfig, "reward": RewardConfig}[kind]
    args = config(output_dir="unused", use_cpu=True, max_length=64, micro_batch_tokens=512, gradient_checkpointing=True)
    found = Search(PlanRequest(kind, args, MODEL, Machine(2, 80 * GIB), prompt_tokens=32)).run()
    assert found.plan.fits
    assert ("logprob_chunk_size" in found.arguments) is (kind == "sft")
