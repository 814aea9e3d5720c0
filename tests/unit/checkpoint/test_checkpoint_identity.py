"""A checkpoint is resumed by the run that wrote it."""

from __future__ import annotations

import pytest
from datasets import Dataset

from lowpeak import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from lowpeak.errors import CheckpointError
from tiny import char_tokenizer, tiny_model

SMALL = {"max_steps": 2, "save_steps": 1, "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 8}
DATA = Dataset.from_list([{"prompt": f"{i % 10}=", "completion": str(i % 10)} for i in range(32)])


def ones(completions, **columns):
    return [float(text.count("1")) for text in completions]


def twos(completions, **columns):
    return [float(text.count("2")) for text in completions]


def online(tmp_path, config=GRPOConfig, trainer=GRPOTrainer, reward=ones, **changes):
    settings = {**SMALL, "num_generations": 4, "max_completion_length": 4, **changes}
    args = config(output_dir=str(tmp_path), **settings)
    return trainer(tiny_model(), reward, args, DATA, processing_class=char_tokenizer())


def supervised(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), **SMALL)
    return SFTTrainer(tiny_model(), args, train_dataset=DATA, processing_class=char_tokenizer())


def test_another_algorithm_does_not_go_on_from_a_checkpoint(tmp_path):
    online(tmp_path).train()
    with pytest.raises(CheckpointError, match="algorithm was 'grpo' and is 'rloo'"):
        online(tmp_path, RLOOConfig, RLOOTrainer, beta=0.0).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="algorithm was 'grpo' and is 'sft'"):
        supervised(tmp_path).train(resume_from_checkpoint=True)


def test_other_rewards_go_on_with_a_warning_between_two_rollouts(tmp_path, caplog):
    online(tmp_path).train()
    online(tmp_path, reward=twos, max_steps=3).train(resume_from_checkpoint=True)
    assert "reward_funcs was ['ones'] and is ['twos']" in caplog.text


def test_another_batch_size_does_not_go_on_in_the_middle_of_a_rollout(tmp_path):
    online(tmp_path, num_iterations=3).train()
    with pytest.raises(CheckpointError, match="rows of a step was 8 and is 16"):
        online(tmp_path, num_iterations=3, per_device_train_batch_size=16).train(resume_from_checkpoint=True)


def test_another_optimizer_or_model_is_told_in_one_sentence(tmp_path):
    online(tmp_path).train()
    with pytest.raises(CheckpointError, match=r"optimizer states in .* do not fit this run"):
        online(tmp_path, optim="sgd", optim_args="momentum=0.9", max_steps=3).train(resume_from_checkpoint=True)
    args = GRPOConfig(output_dir=str(tmp_path), **SMALL, num_generations=4, max_completion_length=4)
    wider = GRPOTrainer(tiny_model(hidden=64), ones, args, DATA, processing_class=char_tokenizer())
    with pytest.raises(CheckpointError, match=r"weights in .* do not fit this run"):
        wider.train(resume_from_checkpoint=True)
