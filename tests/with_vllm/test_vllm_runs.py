"""GRPO with a colocated vLLM: its weights follow the policy, on one rank and on two, each with an engine or one over both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from spawn import launch

from vllm_runs import grpo_arguments, grpo_trainer, steps_of, weights_of

CASES = ("ddp", "ddp:2", "fsdp2", "zero3")
DRIFT = "sampling/sampling_logp_difference/max"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process: log-rows, weights and the journal."""
    folder = tmp_path_factory.mktemp("alone")
    trainer = grpo_trainer(grpo_arguments(folder, eval_strategy="steps", eval_steps=3))
    trainer.train()
    return trainer, {name: weight.clone() for name, weight in weights_of(trainer).items()}, folder


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    launch("../with_vllm/ranks_grpo.py", [str(out), *CASES], timeout=290)
    return {case: torch.load(out / f"{case}.pt") for case in CASES}


def test_every_rollout_is_written_by_the_policys_own_weights_and_the_correction_weighs_nothing(alone):
    trainer, weights, folder = alone
    steps = steps_of(trainer)
    assert len(steps) == 3
    assert steps[0]["grad_norm"] > 0.1
    assert trainer.run.algorithm.needs_full_sequence  # TRL's default: a weight for each completion
    for step in steps:
        assert step[DRIFT] < 1e-5  # a step of 1e-2 moves log-probs by far more
        ratios = [step[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
        assert ratios == pytest.approx([1.0, 1.0, 1.0], abs=1e-4)
    assert any("eval_reward" in row for row in trainer.state.log_history)
    rows = [json.loads(line) for line in Path(folder, "journal", "steps.jsonl").read_text().splitlines()]
    assert [row["push/bytes"] for row in rows] == [4 * sum(weight.numel() for weight in weights.values())] * 3
    assert all(0 < row["push/proof_seconds"] < row["push/seconds"] for row in rows)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_what_one_process_does(alone, on_two_ranks, case):
    _, weights, _ = alone
    found = on_two_ranks[case]
    assert found["strategy"] == {"d": "Replicated", "f": "Fsdp2", "z": "Zero"}[case[0]]
    assert all(step[DRIFT] < 1e-5 for step in found["steps"])
    for name, weight in weights.items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-3, atol=1e-4, msg=f"{case}: {name}")


@pytest.mark.parametrize("way", ["merged", "alone"])
def test_a_lora_policy_is_generated_with_its_adapter(tmp_path, way):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    more = {"vllm_engine_kwargs": {"enable_lora": True, "max_lora_rank": 8}} if way == "alone" else {}
    trainer = grpo_trainer(grpo_arguments(tmp_path, **more), peft_config=config)
    trainer.train()
    assert all(step[DRIFT] < 1e-5 for step in steps_of(trainer))
    rows = [json.loads(line) for line in (tmp_path / "journal" / "steps.jsonl").read_text().splitlines()]
    adapter = 4 * sum(p.numel() for name, p in trainer.model.named_parameters() if "lora_" in name)
    first, second = rows[0]["push/bytes"], rows[1]["push/bytes"]
    if way == "alone":
        assert second == adapter
        assert first > 5 * adapter  # the base, once
    else:
        assert adapter < second < first  # what training does not change comes once


@pytest.mark.release
@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_trls_recipes_of_importance_sampling_train_two_steps(tmp_path, mode):
    bound = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_cap": 2.0}
    trainer = grpo_trainer(grpo_arguments(tmp_path, max_steps=2, vllm_importance_sampling_correction=True, **bound))
    trainer.train()
    assert all(step["grad_norm"] > 0 for step in steps_of(trainer))
    assert trainer.args.vllm_importance_sampling_clip_max == 2.0


def test_a_resumed_run_generates_with_the_checkpoints_weights(tmp_path):
    grpo_trainer(grpo_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)).train()
    resumed = grpo_trainer(grpo_arguments(tmp_path, max_steps=4))
    resumed.train(resume_from_checkpoint=True)
    steps = steps_of(resumed)
    assert len(steps) == 4
    assert all(step[DRIFT] < 1e-5 for step in steps)


def test_bf16_weights_with_low_bits_are_pushed_as_they_are(tmp_path):
    more = {"weight_bits": 32, "vllm_engine_kwargs": {"dtype": "bfloat16"}}
    trainer = grpo_trainer(grpo_arguments(tmp_path, **more))
    trainer.train()
    weights = weights_of(trainer)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    rows = [json.loads(line) for line in (tmp_path / "journal" / "steps.jsonl").read_text().splitlines()]
    assert [row["push/bytes"] for row in rows] == [2 * sum(weight.numel() for weight in weights.values())] * len(rows)
    assert all(step[DRIFT] < 0.1 for step in steps_of(trainer))  # both compute in bf16, in another order
