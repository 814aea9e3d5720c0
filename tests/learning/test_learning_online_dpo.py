"""Online DPO learns: held-out accuracy of noisy sort rises from the wrong start, by a reward and by a judge."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.harness.accuracy import measure
from benchmarks.harness.task import HELD_OUT_SEED, load_example, noisy_sort, warm_start
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowpeak import OnlineDPOConfig, OnlineDPOTrainer

STEPS, PROMPTS, GENERATIONS = 70, 32, 8


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    warm_start(folder, seed=0)
    return folder


def accuracy(model, tokenizer):
    prompts = noisy_sort.draw_prompts(512, HELD_OUT_SEED, held_out=True)
    return measure(model.eval(), tokenizer, prompts, [noisy_sort.answer_to(prompt) for prompt in prompts])


@pytest.mark.parametrize("by", ["reward", "judge"])
def test_held_out_accuracy_rises(tmp_path, start, by):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    before = accuracy(model, tokenizer)
    args = OnlineDPOConfig(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=noisy_sort.MAX_COMPLETION_LENGTH,
        learning_rate=5e-4,
        warmup_steps=10,
        weight_decay=0.0,
        beta=0.1,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    run = OnlineDPOTrainer(
        model,
        args=args,
        train_dataset=noisy_sort.make_prompts(STEPS * PROMPTS, 0),
        processing_class=tokenizer,
        **(
            {"reward_funcs": noisy_sort.sorted_exactly}
            if by == "reward"
            else {"judge": load_example("noisy_sort_judge").judge}
        ),
    )
    run.train()
    after = accuracy(model, tokenizer)
    print(f"{by}: {before} -> {after}")
    assert before["sampled"] < 0.1
    assert after["sampled"] > before["sampled"] + 0.12
