"""A damaged file of a model's folder, or of the best checkpoint, is one sentence that names the file and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainerCallback

from lowpeak import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from lowpeak.errors import CheckpointError, ModelError
from tiny import char_tokenizer, tiny_model

TABLE = Dataset.from_list([{"prompt": f"{i}=", "completion": "1"} for i in range(8)])
SMALL = {"max_steps": 2, "save_steps": 1, "disable_tqdm": True, "use_cpu": True, "report_to": "none"}


def ones(completions, **columns):
    return [float(completion.count("1")) for completion in completions]


def build(folder, model=None, rewards=ones, eval_dataset=None, **changes):
    moving = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "num_iterations": 2}
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 5}
    return GRPOTrainer(
        model=model or tiny_model(),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(folder), **{**SMALL, **moving, **sizes, **changes}),
        train_dataset=TABLE,
        eval_dataset=eval_dataset,
        processing_class=None if isinstance(model, str) else char_tokenizer(),
    )


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


def test_the_damaged_checkpoint_of_the_best_model_is_named_when_it_is_loaded_at_the_end(tmp_path):
    class Damaging(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                truncate(Path(state.best_model_checkpoint) / "model.safetensors")

    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    trainer = build(tmp_path / "run", eval_dataset=TABLE, **best)
    trainer.add_callback(Damaging())
    with pytest.raises(
        CheckpointError, match=r"checkpoint-\d/model.safetensors is damaged \(.*\): resume from another"
    ):
        trainer.train()


@pytest.fixture
def folder(tmp_path):
    """A folder with a model and its tokenizer."""
    tiny_model().save_pretrained(tmp_path / "model")
    char_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("damage", [truncate, empty])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_damaged_file_of_the_model_is_named(folder, tmp_path, file, damage):
    damage(folder / file)
    with pytest.raises(ModelError, match=rf"{folder / file} is damaged \(.*\): copy or download the model again"):
        build(tmp_path / "run", str(folder))
    with pytest.raises(ModelError, match=rf"{folder / file} is damaged"):
        SFTTrainer(str(folder), args=SFTConfig(output_dir=str(tmp_path / "run"), **SMALL), train_dataset=TABLE)


def test_damaged_weights_of_torch_s_own_format_are_named(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    truncate(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is damaged"):
        build(tmp_path / "run", str(folder))


def test_a_damaged_file_of_a_reward_model_is_named(tmp_path):
    config = Qwen2Config(**{**tiny_model().config.to_dict(), "num_labels": 1, "architectures": None})
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    char_tokenizer().save_pretrained(tmp_path / "judge")
    truncate(tmp_path / "judge" / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"judge/model.safetensors is damaged \(.*\): copy or download the reward model"
    ):
        build(tmp_path / "run", rewards=str(tmp_path / "judge"))
