"""The choice of settings that fit: what is kept without need, what changes when memory is short, and what would make a run fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from transformers import Qwen2Config

from lowpeak import GRPOConfig
from lowpeak.plan import GIB, Fit, Machine, PlanRequest, Search, make_plan

MODEL = Qwen2Config(
    vocab_size=8_192, hidden_size=1_024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    intermediate_size=4_096, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip


def request(memory: float, devices: int = 1, **arguments: object) -> PlanRequest:
    args = GRPOConfig(
        output_dir="unused", use_cpu=True, per_device_train_batch_size=8, num_generations=8, max_completion_length=64, **arguments
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
        applied, _ = search._applied(candidate, {})
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
