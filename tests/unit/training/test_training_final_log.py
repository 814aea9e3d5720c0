"""The last entry of the log has the metrics of the steps that no other entry told of, as in TRL."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from lowpeak import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from preferences import tiny_classifier
from tiny import char_tokenizer, tiny_model

TOKENIZER = char_tokenizer()
COMMON = {"per_device_train_batch_size": 8, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}


def grpo(tmp_path, **changes):
    args = GRPOConfig(
        output_dir=str(tmp_path), **{**COMMON, "num_generations": 4, "max_completion_length": 5, **changes}
    )
    data = Dataset.from_list([{"prompt": f"{i}="} for i in range(8)])
    return GRPOTrainer(
        tiny_model(), lambda completions, **c: [float(len(x)) for x in completions], args, data, None, TOKENIZER
    )


def sft(tmp_path, **changes):
    data = Dataset.from_list([{"prompt": f"{i}=", "completion": str(i)} for i in range(8)])
    args = SFTConfig(output_dir=str(tmp_path), **COMMON, **changes)
    return SFTTrainer(tiny_model(), args, train_dataset=data, processing_class=TOKENIZER)


def reward(tmp_path, **changes):
    data = Dataset.from_list([{"chosen": f"{i}=1", "rejected": f"{i}=2"} for i in range(8)])
    args = RewardConfig(output_dir=str(tmp_path), **COMMON, **changes)
    return RewardTrainer(tiny_classifier(), args, train_dataset=data, processing_class=TOKENIZER)


def steps(tmp_path):
    return [json.loads(line) for line in (tmp_path / "journal" / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (grpo, ("reward", "entropy", "num_tokens")),
        (sft, ("entropy", "num_tokens")),
        (reward, ("accuracy", "num_tokens")),
    ],
)
def test_a_run_shorter_than_logging_steps_logs_its_metrics_at_the_end(tmp_path, make, names):
    run = make(tmp_path, max_steps=3)
    run.train()
    (entry,) = run.state.log_history
    assert {"train_loss", "train_runtime", *names} <= entry.keys()
    assert entry["num_tokens"] == steps(tmp_path)[-1]["num_tokens"]


def test_the_last_entry_is_of_the_steps_since_the_one_before(tmp_path):
    run = grpo(tmp_path, max_steps=5, logging_steps=2)
    run.train()
    *_, entry = run.state.log_history
    assert entry["reward"] == pytest.approx(steps(tmp_path)[-1]["reward"])
    assert entry["entropy"] == pytest.approx(steps(tmp_path)[-1]["entropy"])


def test_where_all_steps_were_told_the_last_entry_is_transformers_own(tmp_path):
    run = grpo(tmp_path, max_steps=2, logging_steps=1)
    run.train()
    assert "reward" not in run.state.log_history[-1]
    assert "train_loss" in run.state.log_history[-1]


class Stop(TrainerCallback):
    """Ask to stop after so many steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.steps


def test_a_run_that_stops_early_and_one_that_goes_on_log_their_own_steps(tmp_path):
    changes = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    stopped = grpo(tmp_path, **changes)
    stopped.add_callback(Stop(3))
    stopped.train()
    mean = sum(row["reward"] for row in steps(tmp_path)) / 3
    assert stopped.state.log_history[-1]["reward"] == pytest.approx(mean)
    resumed = grpo(tmp_path, **changes)
    resumed.train(resume_from_checkpoint=True)
    mean = sum(row["reward"] for row in steps(tmp_path)[2:]) / 3
    assert resumed.state.log_history[-1]["reward"] == pytest.approx(mean)
    finished = grpo(tmp_path, **changes)
    finished.train(resume_from_checkpoint=True)
    assert "reward" not in finished.state.log_history[-1]


def test_completions_that_no_entry_showed_are_printed_at_the_end(tmp_path, capsys):
    grpo(tmp_path, max_steps=1, log_completions=True, num_completions_to_print=1).train()
    assert "step 1" in capsys.readouterr().out
