"""Sizes within a memory budget: they grow with it, every phase stays below, and what cannot fit says what to change."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import Qwen2Config

from case_selection import mark_extended
from lowpeak import GRPOConfig, SFTConfig
from lowpeak.plan.budget import budget_of, fit_sizes
from lowpeak.plan.hardware import GIB, Machine
from lowpeak.plan.plan import make_plan
from lowpeak.plan.request import PlanRequest

MIB = 1 << 20
MODEL = Qwen2Config(
    vocab_size=8_192, hidden_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
    intermediate_size=1_024, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
AUTO = {"micro_batch_tokens", "logprob_chunk_size", "kv_cache_bytes"}


def request(kind: str = "grpo", strategy: str = "single", device: Any = "cpu", **changes: Any) -> PlanRequest:
    devices = 1 if strategy == "single" else 4
    online = {"num_generations": 4, "max_completion_length": 64} if kind == "grpo" else {"max_length": 96}
    arguments = {"output_dir": "unused", "use_cpu": True, "per_device_train_batch_size": 64, **online, **changes}
    args = {"grpo": GRPOConfig, "sft": SFTConfig}[kind](**arguments)
    return PlanRequest(kind, args, MODEL, Machine(devices, 80 * GIB, device=device), strategy, prompt_tokens=32)


@cache
def fitted(kind: str, mebibytes: int) -> Any:
    return fit_sizes(request(kind), mebibytes * MIB)


@pytest.mark.parametrize(
    ("kind", "mebibytes"),
    mark_extended([("grpo", 290), ("sft", 400)], [("grpo", 290)]),
)
def test_every_phase_stays_within_the_budget_and_the_plan_is_that_of_the_sizes(kind, mebibytes):
    found = fitted(kind, mebibytes)
    assert not found.problem
    assert set(found.sizes) == (AUTO if kind == "grpo" else AUTO - {"kv_cache_bytes"})
    assert found.plan.peak <= mebibytes * MIB
    again = make_plan(request(kind, **found.sizes))
    assert {name: phase.peak for name, phase in again.phases.items()} == {
        name: phase.peak for name, phase in found.plan.phases.items()
    }


@pytest.mark.release
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_larger_budget_has_larger_micro_batches(kind):
    tokens = [fitted(kind, mebibytes).sizes["micro_batch_tokens"] for mebibytes in (290, 400, 2_000)]
    assert tokens == sorted(set(tokens))


@pytest.mark.release
def test_twice_the_tokens_would_exceed_the_budget():
    found = fitted("sft", 400)
    twice = {**found.sizes, "micro_batch_tokens": 2 * found.sizes["micro_batch_tokens"]}
    assert make_plan(request("sft", **twice)).peak > 400 * MIB


@pytest.mark.release
def test_with_room_a_step_is_one_micro_batch_and_a_rollout_one_wave():
    found = fitted("grpo", 2_000)
    assert found.plan.num_batches == 1
    assert found.sizes["logprob_chunk_size"] == 1024
    assert found.plan.work.slots >= 64


@pytest.mark.release
def test_buckets_of_weights_for_vllm_shrink_if_a_sync_would_exceed_the_budget():
    served = {"use_vllm": True, "vllm_mode": "server"}
    roomy, tight = (fit_sizes(request(**served), mebibytes * MIB) for mebibytes in (2_000, 270))
    assert roomy.sizes["vllm_bucket_size"] == 64 * MIB
    assert MIB <= tight.sizes["vllm_bucket_size"] < 64 * MIB
    assert tight.plan.peak <= 270 * MIB < roomy.plan.phases["sync"].peak
    given = fit_sizes(request(**served, vllm_bucket_size="8MiB"), 270 * MIB)
    assert "vllm_bucket_size" not in given.sizes
    refused = fit_sizes(request(**served, vllm_bucket_size="256MiB"), 270 * MIB)
    assert "lower vllm_bucket_size (now 268435456)" in refused.problem


def test_bytes_beside_tensors_count():
    given = request("sft", micro_batch_tokens=512, logprob_chunk_size=64)
    problems = [fit_sizes(given, 2_000 * MIB, unplanned_bytes=each * MIB).problem for each in (0, 1_900)]
    assert [bool(problem) for problem in problems] == [False, True]


@pytest.mark.release
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_sharded_rollout_keeps_gathered_what_the_cache_leaves(strategy):
    large_cache = request("grpo", strategy, "cuda", kv_cache_bytes=1 << 28, per_device_train_batch_size=512)
    found = fit_sizes(large_cache, 4 * GIB)
    assert found.plan.peak <= 4 * GIB
    assert found.sizes["gather_budget"] >= 2 * found.plan.counts.total
    budget = found.plan.phases["rollout"].peak - 16 * MIB
    less = fit_sizes(large_cache, budget)
    assert less.plan.peak <= budget
    assert 0 < less.sizes["gather_budget"] < found.sizes["gather_budget"]


@pytest.mark.release
def test_explicit_sizes_stay_and_the_others_follow():
    found = fit_sizes(request(micro_batch_tokens=256, kv_cache_bytes=1 << 21), 400 * MIB)
    assert set(found.sizes) == {"logprob_chunk_size"}
    assert found.plan.tokens <= 256


LARGE_CACHE = {"kv_cache_bytes": 1 << 31, "per_device_train_batch_size": 4096, "gradient_accumulation_steps": 1}


@pytest.mark.release
@pytest.mark.parametrize(
    ("kind", "given", "mebibytes", "parts"),
    [
        ("sft", {"micro_batch_tokens": 8192}, 350, ["lower micro_batch_tokens (now 8192)", "phase backward"]),
        ("grpo", LARGE_CACHE, 400, ["lower kv_cache_bytes (now 2147483648)"]),
        ("sft", {}, 200, ["phase backward takes 2", "the smallest change is weight_bits"]),
        ("sft", {}, 20, ["raise memory_budget"]),
    ],
)
def test_a_problem_names_the_budget_and_the_given_size_or_the_smallest_change_that_helps(kind, given, mebibytes, parts):
    problem = fit_sizes(request(kind, **given), mebibytes * MIB).problem
    assert [part for part in (*parts, f"memory_budget is {mebibytes} MiB") if part not in problem] == []


@pytest.mark.parametrize(
    ("budget", "expected"), [(None, None), ("auto", 80 * GIB), (0.5, 40 * GIB), ("0.25", 20 * GIB), ("3GiB", 3 * GIB)]
)
def test_a_planned_budget_is_of_the_planned_device(budget, expected):
    assert budget_of(request(memory_budget=budget)) == expected
