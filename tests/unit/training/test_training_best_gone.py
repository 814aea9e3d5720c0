"""The best checkpoint may be removed while a run trains: it keeps its last weights, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from lowpeak import PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from tiny import char_tokenizer, tiny_model

ROWS = Dataset.from_list([{"prompt": f"{i % 10}=", "completion": str(i % 10)} for i in range(16)])
SETTINGS = {
    "max_steps": 2,
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "save_total_limit": 1,
    "use_cpu": True,
    "disable_tqdm": True,
}


class RemoveBest(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 2:
            shutil.rmtree(state.best_model_checkpoint)


def supervised(folder: Path):
    args = SFTConfig(output_dir=str(folder), metric_for_best_model="loss", **SETTINGS)
    return SFTTrainer(tiny_model(), args, None, ROWS, ROWS, processing_class=char_tokenizer())


def ppo(folder: Path):
    sizes = {"num_generations": 2, "max_completion_length": 3, "metric_for_best_model": "reward"}
    args = PPOConfig(output_dir=str(folder), **sizes, **SETTINGS)
    lengths = lambda completions, **columns: [float(len(text)) for text in completions]  # noqa: E731
    return PPOTrainer(tiny_model(), lengths, args, ROWS, ROWS, processing_class=char_tokenizer())


@pytest.mark.parametrize("make", [supervised, ppo])
def test_a_best_checkpoint_that_was_removed_is_told_and_the_last_weights_stay(tmp_path, caplog, make):
    trainer = make(tmp_path)
    trainer.add_callback(RemoveBest())
    trainer.train()
    told = [
        record.getMessage()
        for record in caplog.records
        if "best" in record.getMessage() and record.levelname == "WARNING"
    ]
    assert len(told) == 1
    assert told[0].startswith(f"load_best_model_at_end: the best checkpoint, {tmp_path}/checkpoint-")
    assert told[0].endswith("was removed; the last step's weights stay.")
