"""PPO learns: held-out accuracy of noisy sort rises from the wrong start, by a function and by a trained reward model."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.harness.accuracy import measure
from benchmarks.harness.task import HELD_OUT_SEED, noisy_sort, train_judge, warm_start
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowpeak import PPOConfig, PPOTrainer

PROMPTS, GENERATIONS = 32, 8
pytestmark = pytest.mark.timeout(1800)  # training the reward model takes minutes on a slow processor
JUDGE_STEPS = 700
# A reward model can be fooled, so the policy is held to its start, and the critic begins as the reward model and learns first.
WAYS = {
    "function": {"max_steps": 80, "learning_rate": 5e-4, "value_learning_rate": 1e-2, "beta": 0.0},
    "reward model": {
        "max_steps": 160,
        "learning_rate": 3e-4,
        "value_learning_rate": 5e-4,
        "beta": 0.2,
        "critic": "model",
        "value_warmup_steps": 10,
    },
}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    warm_start(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory, start) -> Path:
    """A reward model of the task, trained on preferences from the same start."""
    folder = tmp_path_factory.mktemp("judge")
    train_judge(start, folder, 0, JUDGE_STEPS)
    return folder


def accuracy(model, tokenizer):
    prompts = noisy_sort.draw_prompts(512, HELD_OUT_SEED, held_out=True)
    return measure(model.eval(), tokenizer, prompts, [noisy_sort.answer_to(prompt) for prompt in prompts])


@pytest.mark.parametrize("by", WAYS)
def test_held_out_accuracy_rises(tmp_path, start, judge, by):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    before = accuracy(model, tokenizer)
    args = PPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        num_iterations=2,
        max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH,
        vf_coef=0.5,
        cliprange_value=None,
        warmup_steps=10,
        weight_decay=0.0,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        value_model_path=None if by == "function" else str(judge),
        **WAYS[by],
    )
    run = PPOTrainer(
        model,
        noisy_sort.sorted_exactly if by == "function" else str(judge),
        args,
        noisy_sort.make_prompts(args.max_steps * PROMPTS, 0),
        processing_class=tokenizer,
    )
    run.train()
    after = accuracy(model, tokenizer)
    print(f"{by}: {before} -> {after}")
    assert before["sampled"] < 0.1
    assert after["sampled"] > before["sampled"] + 0.12
