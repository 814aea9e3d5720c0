"""A checkpoint is resumed by the run that wrote it."""

from __future__ import annotations

import json
import re

import pytest
from datasets import Dataset

from damage import sign_again
from lowpeak import (
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    PPOConfig,
    PPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowpeak.checkpoint.atomic import last_checkpoint
from lowpeak.errors import CheckpointError
from lowpeak.journal import read_steps
from tiny import char_tokenizer, tiny_model

SMALL = {"max_steps": 2, "save_steps": 1, "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 8}
ONLINE = {
    "grpo": (GRPOConfig, GRPOTrainer, {}),
    "rloo": (RLOOConfig, RLOOTrainer, {}),
    "ppo": (PPOConfig, PPOTrainer, {"num_iterations": 1, "steps_per_generation": 1}),
    "online_dpo": (OnlineDPOConfig, OnlineDPOTrainer, {}),
}
DATA = Dataset.from_list([{"prompt": f"{i % 10}=", "completion": str(i % 10)} for i in range(32)])


def ones(completions, **columns):
    return [float(text.count("1")) for text in completions]


def twos(completions, **columns):
    return [float(text.count("2")) for text in completions]


def online(tmp_path, config=GRPOConfig, trainer=GRPOTrainer, reward=ones, data=DATA, **changes):
    settings = {**SMALL, "num_generations": 4, "max_completion_length": 4, **changes}
    args = config(output_dir=str(tmp_path), **settings)
    return trainer(tiny_model(), reward_funcs=reward, args=args, train_dataset=data, processing_class=char_tokenizer())


def supervised(tmp_path, **changes):
    args = SFTConfig(output_dir=str(tmp_path), **{**SMALL, **changes})
    return SFTTrainer(tiny_model(), args, train_dataset=DATA, processing_class=char_tokenizer())


def test_another_algorithm_or_another_shape_does_not_go_on_and_other_rewards_do_with_a_warning(tmp_path, caplog):
    online(tmp_path).train()
    with pytest.raises(CheckpointError, match=r"algorithm .*'grpo' .*'rloo'"):
        online(tmp_path, RLOOConfig, RLOOTrainer, beta=0.0).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"algorithm .*'grpo' .*'sft'"):
        supervised(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 .*momentum"):
        online(tmp_path, optim="sgd", optim_args="momentum=0.9", max_steps=3).train(resume_from_checkpoint=True)
    online(tmp_path, reward=twos, max_steps=3).train(resume_from_checkpoint=True)
    assert re.search(r"reward_funcs .*'ones'.*'twos'", caplog.text)


def of_kind(name, tmp_path, **changes):
    config, trainer, settings = ONLINE[name]
    return online(tmp_path, config, trainer, **{**settings, **changes})


@pytest.mark.parametrize(
    ("name", "changed"), zip(ONLINE, 2 * [{"num_iterations": 3}, {"steps_per_generation": 2}], strict=True)
)
def test_a_rollout_that_was_used_up_stays_so_when_more_steps_are_asked_of_one(tmp_path, name, changed):
    of_kind(name, tmp_path).train()
    of_kind(name, tmp_path, **changed, max_steps=4).train(resume_from_checkpoint=True)
    rows = [json.loads(line) for line in (tmp_path / "journal/rollouts.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3}


@pytest.mark.parametrize("name", ONLINE)
def test_another_shape_of_a_rollout_does_not_go_on_in_its_middle(tmp_path, name):
    of_kind(name, tmp_path, num_iterations=3).train()
    with pytest.raises(CheckpointError, match=r"num_iterations .*3.*2"):
        of_kind(name, tmp_path, num_iterations=2).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r" 8 .* 16"):
        of_kind(name, tmp_path, num_iterations=3, per_device_train_batch_size=16).train(resume_from_checkpoint=True)


def test_a_new_run_in_the_same_folder_keeps_the_old_ones_and_resumes_its_own(tmp_path):
    supervised(tmp_path, max_steps=4, save_total_limit=1).train()
    supervised(tmp_path, save_total_limit=1).train()
    assert (tmp_path / "earlier-1" / "checkpoint-4").is_dir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lowpeak.lock"
    }


def test_a_resume_that_fails_leaves_the_folder_as_it_was(tmp_path):
    online(tmp_path).train()
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 .* momentum.*optim, optim_args "):
        online(tmp_path, optim="sgd").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert contents(tmp_path) == before
    args = GRPOConfig(output_dir=str(tmp_path), **SMALL, num_generations=4, max_completion_length=4)
    wider = GRPOTrainer(tiny_model(hidden=64), ones, args, DATA, processing_class=char_tokenizer())
    with pytest.raises(CheckpointError, match=r"checkpoint-1 .* model, "):
        wider.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert contents(tmp_path) == before


def test_a_checkpoint_that_is_named_after_another_step_is_told_and_stays_where_it_is(tmp_path):
    online(tmp_path).train()
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-7")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint-7 .* 1.* checkpoint-1"):
        online(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert contents(tmp_path) == before
    elsewhere = tmp_path / "kept" / "checkpoint-7"
    elsewhere.parent.mkdir()
    (tmp_path / "checkpoint-7").rename(elsewhere)
    online(tmp_path).train(resume_from_checkpoint=str(elsewhere))
    assert len(read_steps(tmp_path / "journal")) == 2


def of_any_kind(name, tmp_path, **changes):
    return supervised(tmp_path, **changes) if name == "sft" else of_kind(name, tmp_path, **changes)


@pytest.mark.parametrize("name", ["grpo", "ppo", "sft"])
def test_arguments_that_a_checkpoints_states_overrule_are_named_in_one_warning(tmp_path, name, caplog):
    changed = {"learning_rate": 0.25, "weight_decay": 0.5, "adam_beta2": 0.75, "adam_epsilon": 0.125}
    first = {"learning_rate": 0.0625, "weight_decay": 0.0, "adam_beta2": 0.5, "adam_epsilon": 0.25}
    if name == "ppo":
        first["value_learning_rate"], changed["value_learning_rate"] = 0.03125, 0.5
    of_any_kind(name, tmp_path, **first).train()
    of_any_kind(name, tmp_path, **first, max_steps=3).train(True)
    assert " acts)" not in caplog.text
    last = of_any_kind(name, tmp_path, **changed, max_steps=4)
    last.train(True)
    (told,) = [record.getMessage() for record in caplog.records if " acts)" in record.getMessage()]
    named = re.findall(r"(\w+)=([\d.]+) \(([\d.]+) acts\)", told)
    assert sorted(named) == sorted((key, str(changed[key]), str(first[key])) for key in first)
    assert last.lr_scheduler.base_lrs[0] == 0.0625


def test_numbers_of_other_optimizers_and_schedules_are_named_too(tmp_path, caplog):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
    settings = {"optim": "sgd", **plateau, "metric_for_best_model": "loss", "optim_args": "momentum=0.5"}

    def run(**changes):
        args = SFTConfig(output_dir=str(tmp_path), **{**SMALL, **settings, **changes})
        trainer = SFTTrainer(tiny_model(), args, None, DATA, DATA, processing_class=char_tokenizer())
        trainer.train(resume_from_checkpoint=bool(changes))

    run()
    run(optim_args="momentum=0.75", lr_scheduler_kwargs={"patience": 3}, max_steps=3)
    assert "optim's momentum=0.75 (0.5 acts), lr_scheduler_kwargs' patience=3 (10 acts)" in caplog.text


def test_other_data_of_the_same_size_is_named_and_a_checkpoint_without_a_digest_resumes(tmp_path, caplog):
    online(tmp_path).train()
    online(tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert "train_dataset" not in caplog.text
    others = Dataset.from_list([{"prompt": f"{i % 7}=", "completion": str(i % 10)} for i in range(32)])
    online(tmp_path, data=others, max_steps=4).train(resume_from_checkpoint=True)
    assert caplog.text.count("train_dataset") == 1
    file = tmp_path / "checkpoint-4/lowpeak_state.json"
    state = json.loads(file.read_text())
    del state["cursor"]["digest"]
    file.write_text(json.dumps(state))
    sign_again(file.parent)
    online(tmp_path, max_steps=5).train(resume_from_checkpoint=True)
    assert caplog.text.count("train_dataset") == 1
