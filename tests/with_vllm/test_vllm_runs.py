"""GRPO with a colocated vLLM: its weights follow the policy, on one rank and on two, each with an engine or one over both."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from spawn import launch

from lowpeak import DistillationConfig, DistillationTrainer
from vllm_runs import DATA, TOKENIZER, arguments_in, grpo_arguments, grpo_trainer, small_model, steps_of, weights_of

DRIFT = "sampling/sampling_logp_difference/max"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process: log-rows, weights, the bytes and seconds of its pushes, and how to make it again."""
    folder = tmp_path_factory.mktemp("alone")
    made = partial(grpo_arguments, folder, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=2)
    trainer = grpo_trainer(made())
    trainer.train()
    return trainer, {name: weight.clone() for name, weight in weights_of(trainer).items()}, pushes_in(folder), made


def pushes_in(folder):
    rows = [json.loads(line) for line in Path(folder, "journal", "steps.jsonl").read_text().splitlines()]
    return [[row[f"push/{name}"] for name in ("bytes", "proof_seconds", "seconds")] for row in rows]


def test_every_rollout_is_written_by_the_policys_own_weights_and_the_correction_weighs_nothing(alone):
    trainer, weights, pushes, _ = alone
    steps = steps_of(trainer)
    assert len(steps) == 3
    assert steps[0]["grad_norm"] > 0.1
    assert trainer.run.algorithm.needs_full_sequence  # TRL's default: a weight for each completion
    for step in steps:
        assert step[DRIFT] < 1e-5  # a step of 1e-2 moves log-probs by far more
        ratios = [step[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max")]
        assert ratios == pytest.approx([1.0, 1.0, 1.0], abs=1e-4)
    assert any("eval_reward" in row for row in trainer.state.log_history)
    assert [num_bytes for num_bytes, *_ in pushes] == [4 * sum(weight.numel() for weight in weights.values())] * 3
    assert all(0 < proof_seconds < seconds for _, proof_seconds, seconds in pushes)


@pytest.mark.parametrize("cases", [("ddp:2", "fsdp2"), pytest.param(("ddp", "zero3"), marks=pytest.mark.release)])
def test_two_ranks_train_what_one_process_does(tmp_path, alone, cases):
    _, weights, *_ = alone
    long = ["ddp:2:long"] if "ddp:2" in cases else []
    launch("../with_vllm/ranks_grpo.py", [str(tmp_path), *cases, *long], timeout=290)
    for case in long:
        found = torch.load(tmp_path / f"{case}.pt")
        assert all(step[DRIFT] < 1e-4 for step in found["steps"])
        first, second = found["capacities"]
        assert first == second
        assert max(first) > first[0]  # short completions let more run at once
    for case in cases:
        found = torch.load(tmp_path / f"{case}.pt")
        assert found["strategy"] == {"d": "Replicated", "f": "Fsdp2", "z": "Zero"}[case[0]]
        assert all(step[DRIFT] < 1e-5 for step in found["steps"])
        for name, weight in weights.items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-3, atol=1e-4, msg=f"{case}: {name}")


def test_a_teacher_reads_what_vllm_wrote(tmp_path):
    args = DistillationConfig(**arguments_in(tmp_path, max_steps=2, num_generations=1, teacher_model_kind="live"))
    data = DATA.add_column("privileged_context", ["77"] * len(DATA))
    run = DistillationTrainer(small_model(), args=args, train_dataset=data, processing_class=TOKENIZER)
    run.train()
    assert len(steps_of(run)) == 2
    assert all(step[DRIFT] < 1e-5 and step["divergence"] > 1e-6 for step in steps_of(run))


@pytest.mark.release
@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_trls_recipes_of_importance_sampling_train_two_steps(tmp_path, mode):
    bound = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_cap": 2.0}
    trainer = grpo_trainer(grpo_arguments(tmp_path, max_steps=2, vllm_importance_sampling_correction=True, **bound))
    trainer.train()
    assert all(step["grad_norm"] > 0 for step in steps_of(trainer))
    assert trainer.args.vllm_importance_sampling_clip_max == 2.0


def test_a_resumed_run_generates_with_the_checkpoints_weights(alone):
    trainer, weights, _, made = alone
    resumed = grpo_trainer(made())
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    steps = steps_of(resumed)
    assert len(steps) == 3
    assert all(step[DRIFT] < 1e-5 for step in steps)
    for name, weight in weights_of(resumed).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4, msg=name)


def test_bf16_weights_with_low_bits_are_pushed_as_they_are(tmp_path):
    more = {"weight_bits": 32, "vllm_engine_kwargs": {"dtype": "bfloat16"}}
    trainer = grpo_trainer(grpo_arguments(tmp_path, max_steps=2, **more))
    trainer.train()
    weights = weights_of(trainer)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    expected = 2 * sum(weight.numel() for weight in weights.values())
    assert [num_bytes for num_bytes, *_ in pushes_in(tmp_path)] == [expected] * 2
    assert all(step[DRIFT] < 0.1 for step in steps_of(trainer))  # both compute in bf16, in another order
