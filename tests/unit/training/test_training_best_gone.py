"""The best checkpoint may be removed while a run trains: it keeps its last weights, and says so."""

from __future__ import annotations

import shutil

import pytest
from transformers import TrainerCallback

from small_runs import make, rows, supervised_rows

SETTINGS = {
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "save_total_limit": 1,
}
KINDS = {
    "SFT": {"eval_dataset": supervised_rows(), "metric_for_best_model": "loss"},
    "PPO": {"eval_dataset": rows(), "metric_for_best_model": "reward", "num_generations": 2},
}


class RemoveBest(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 2:
            shutil.rmtree(state.best_model_checkpoint)


@pytest.mark.parametrize("kind", KINDS)
def test_a_best_checkpoint_that_was_removed_is_told_and_the_last_weights_stay(tmp_path, caplog, kind):
    trainer = make(kind, tmp_path, **SETTINGS, **KINDS[kind])
    trainer.add_callback(RemoveBest())
    trainer.train()
    told = [
        record.getMessage()
        for record in caplog.records
        if "best" in record.getMessage() and record.levelname == "WARNING"
    ]
    assert len(told) == 1
    assert f"load_best_model_at_end: the best checkpoint, {tmp_path}/checkpoint-" in told[0]
