"""A checkpoint is resumed by the run that wrote it."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache

import pytest
from datasets import Dataset

from case_selection import mark_extended
from file_damage import sign_again
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
from lowpeak.checkpoint.folders import last_checkpoint
from lowpeak.checkpoint.run_state import learning_arguments
from lowpeak.errors import ArgumentError, CheckpointError
from lowpeak.journal import read_steps
from tiny_models import char_tokenizer, tiny_model

SMALL = {"max_steps": 2, "save_steps": 1, "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 8}
GENERATING = {"num_generations": 4, "max_completion_length": 4}
KINDS = {
    "grpo": (GRPOConfig, GRPOTrainer, GENERATING),
    "rloo": (RLOOConfig, RLOOTrainer, GENERATING),
    "ppo": (PPOConfig, PPOTrainer, {**GENERATING, "num_iterations": 1, "steps_per_generation": 1}),
    "online_dpo": (OnlineDPOConfig, OnlineDPOTrainer, GENERATING),
    "sft": (SFTConfig, SFTTrainer, {}),
}
DATA = Dataset.from_list([{"prompt": f"{i % 10}=", "completion": str(i % 10)} for i in range(32)])


def ones(completions, **columns):
    return [float(text.count("1")) for text in completions]


def twos(completions, **columns):
    return [float(text.count("2")) for text in completions]


def run(tmp_path, kind="grpo", *, hidden=32, layers=2, reward=ones, data=DATA, **changes):
    config, trainer, settings = KINDS[kind]
    args = config(output_dir=str(tmp_path), **{**SMALL, **settings, **changes})
    evaluated = data if "eval_strategy" in changes else None
    inputs = {"eval_dataset": evaluated} if kind == "sft" else {"reward_funcs": reward}
    return trainer(
        tiny_model(hidden=hidden, layers=layers),
        args=args,
        train_dataset=data,
        processing_class=char_tokenizer(),
        **inputs,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Give copies of finished runs: by kind and changes one run for all tests."""

    @cache
    def train(kind, changes):
        folder = tmp_path_factory.mktemp(kind)
        run(folder, kind, **dict(changes)).train()
        return folder

    def copy(folder, kind="grpo", **changes):
        shutil.copytree(train(kind, tuple(changes.items())), folder, dirs_exist_ok=True)

    return copy


@pytest.mark.extended
def test_another_algorithm_or_optimizer_is_refused_and_other_rewards_are_a_warning(tmp_path, finished, caplog):
    finished(tmp_path)
    for kind, changes, told in (
        ("rloo", {"beta": 0.0}, r"algorithm .*'grpo' .*'rloo'"),
        ("sft", {}, r"algorithm .*'grpo' .*'sft'"),
        ("grpo", {"optim": "sgd", "optim_args": "momentum=0.9", "max_steps": 3}, r"checkpoint-2 .*momentum"),
    ):
        with pytest.raises(CheckpointError, match=told):
            run(tmp_path, kind, **changes).train(resume_from_checkpoint=True)
    run(tmp_path, reward=twos, max_steps=3).train(resume_from_checkpoint=True)
    assert re.search(r"reward_funcs .*'ones'.*'twos'", caplog.text)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_an_argument_that_the_optimizers_states_replace_is_named_and_is_an_error_if_asked_for(
    tmp_path, finished, kind, caplog
):
    finished(tmp_path, kind)
    with pytest.raises(ArgumentError, match=r"learning_rate=0.5"):
        run(tmp_path, kind, learning_rate=0.5, max_steps=3, strict_arguments=True).train(resume_from_checkpoint=True)
    run(tmp_path, kind, learning_rate=0.5, max_steps=3).train(resume_from_checkpoint=True)
    assert "learning_rate=0.5" in caplog.text


@pytest.mark.parametrize(
    ("kind", "changed"), [("grpo", {"num_iterations": 3}), ("online_dpo", {"steps_per_generation": 2})]
)
def test_a_used_rollout_is_not_extended_when_rollouts_get_more_steps(tmp_path, finished, kind, changed):
    finished(tmp_path, kind)
    run(tmp_path, kind, **changed, max_steps=4).train(resume_from_checkpoint=True)
    rows = [json.loads(line) for line in (tmp_path / "journal/rollouts.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3}


def test_a_resume_within_a_rollout_refuses_another_shape_of_rollouts(tmp_path, finished):
    finished(tmp_path, num_iterations=3)
    with pytest.raises(CheckpointError, match=r"num_iterations .*3.*2"):
        run(tmp_path, num_iterations=2).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r" 8 .* 16"):
        run(tmp_path, num_iterations=3, per_device_train_batch_size=16).train(resume_from_checkpoint=True)


def test_a_new_run_in_the_same_folder_keeps_older_checkpoints_and_resumes_from_its_own(tmp_path):
    for max_steps in (4, 2):
        run(tmp_path, "sft", max_steps=max_steps, save_total_limit=1).train()
    assert (tmp_path / "earlier-1" / "checkpoint-4").is_dir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lowpeak.lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_a_resume_that_fails_leaves_the_folder_as_it_was(tmp_path, finished):
    finished(tmp_path)
    before, first = contents(tmp_path), str(tmp_path / "checkpoint-1")
    told = {
        r"checkpoint-1 .* momentum.*optim, optim_args ": {"optim": "sgd"},
        r"checkpoint-1 .*embed_tokens.* model, ": {"hidden": 64},
        r"checkpoint-1 .*they lack model\.layers\.2\..*9 more.* model, ": {"layers": 3},
        r"checkpoint-1 .*model lacks model\.layers\.1\..*9 more.* model, ": {"layers": 1},
    }
    for pattern, changes in told.items():
        with pytest.raises(CheckpointError, match=pattern):
            run(tmp_path, **changes).train(resume_from_checkpoint=first)
        assert contents(tmp_path) == before


@pytest.mark.extended
def test_a_checkpoint_named_after_another_step_is_an_error_and_is_not_moved(tmp_path, finished):
    finished(tmp_path)
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-7")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint-7 .* 1.* checkpoint-1"):
        run(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert contents(tmp_path) == before
    elsewhere = tmp_path / "kept" / "checkpoint-7"
    elsewhere.parent.mkdir()
    (tmp_path / "checkpoint-7").rename(elsewhere)
    run(tmp_path).train(resume_from_checkpoint=str(elsewhere))
    assert len(read_steps(tmp_path / "journal")) == 2


@pytest.mark.parametrize("kind", mark_extended(["ppo", "sft"], ["ppo"]))
def test_arguments_that_a_checkpoints_states_overrule_are_named_in_one_warning(tmp_path, kind, caplog):
    changed = {"learning_rate": 0.25, "weight_decay": 0.5, "adam_beta2": 0.75, "adam_epsilon": 0.125}
    first = {"learning_rate": 0.0625, "weight_decay": 0.0, "adam_beta2": 0.5, "adam_epsilon": 0.25}
    if kind == "ppo":
        first["value_learning_rate"], changed["value_learning_rate"] = 0.03125, 0.5
    run(tmp_path, kind, **first).train()
    run(tmp_path, kind, **first, max_steps=3).train(True)
    assert " acts)" not in caplog.text
    last = run(tmp_path, kind, **changed, max_steps=4)
    last.train(True)
    (told,) = [record.getMessage() for record in caplog.records if " acts)" in record.getMessage()]
    named = re.findall(r"(\w+)=([\d.]+) \(([\d.]+) acts\)", told)
    assert sorted(named) == sorted((key, str(changed[key]), str(first[key])) for key in first)
    assert last.lr_scheduler.base_lrs[0] == 0.0625


@pytest.mark.extended
def test_numbers_of_other_optimizers_and_schedules_are_named_too(tmp_path, caplog):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
    settings = {"optim": "sgd", **plateau, "metric_for_best_model": "loss"}
    run(tmp_path, "sft", **settings, optim_args="momentum=0.5").train()
    changed = {"optim_args": "momentum=0.75", "lr_scheduler_kwargs": {"patience": 3}, "max_steps": 3}
    run(tmp_path, "sft", **settings, **changed).train(True)
    assert "optim's momentum=0.75 (0.5 acts); lr_scheduler_kwargs' patience=3 (10 acts)" in caplog.text


OTHERS = {
    "grpo": {"beta": 0.5, "loss_type": "grpo", "temperature": 0.5, "scale_rewards": "none", "max_completion_length": 3},
    "ppo": {"kl_target": 0.25, "lam": 0.5, "missing_eos_penalty": 1.0},
    "online_dpo": {"beta": [0.25], "loss_type": "ipo"},
    "sft": {"max_length": 8, "per_device_train_batch_size": 4},
}
SHARED_OTHERS = {"lr_scheduler_type": "cosine", "warmup_steps": 1.0, "max_grad_norm": 0.5, "max_steps": 3}
UNNAMED = {"logging_steps": 5, "micro_batch_tokens": 64, "save_total_limit": 3, "logprob_chunk_size": 8}


@pytest.mark.parametrize("kind", OTHERS)
def test_arguments_that_change_what_is_learned_are_part_of_the_identity(tmp_path, kind):
    config = KINDS[kind][0]

    def learning(**changes):
        return learning_arguments(config(output_dir=str(tmp_path), use_cpu=True, **changes), "fp32")

    others = {name: value for name, value in OTHERS[kind].items() if name != "per_device_train_batch_size"}
    first, found = learning(), learning(**UNNAMED, **SHARED_OTHERS, **others)
    assert learning(**UNNAMED) == first
    assert {name for name in first if found[name] != first[name]} == {*SHARED_OTHERS, *others}


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_other_arguments_that_change_what_is_learned_are_named_in_one_warning(tmp_path, finished, kind, caplog):
    others = {**SHARED_OTHERS, **OTHERS[kind]}
    finished(tmp_path, kind)
    run(tmp_path, kind, **UNNAMED).train(resume_from_checkpoint=True)
    assert " was " not in caplog.text
    run(tmp_path, kind, **UNNAMED, **others).train(resume_from_checkpoint=True)
    (told,) = [record.getMessage() for record in caplog.records if " was " in record.getMessage()]
    renamed = {"per_device_train_batch_size": "rows of a step"}
    assert sorted(re.findall(r"([a-z_ ]+) was ", told)) == sorted(f" {renamed.get(name, name)}" for name in others)
    assert "max_grad_norm was 1.0 and is 0.5" in told
    assert "lr_scheduler_type was 'linear' and is 'cosine'" in told


@pytest.mark.extended
def test_a_checkpoint_without_arguments_resumes_with_others(tmp_path, finished, caplog):
    finished(tmp_path)
    file = tmp_path / "checkpoint-2/lowpeak_state.json"
    state = json.loads(file.read_text())
    del state["identity"]["arguments"]
    file.write_text(json.dumps(state))
    sign_again(file.parent)
    run(tmp_path, beta=0.5, max_steps=3).train(resume_from_checkpoint=True)
    assert " was " not in caplog.text


@pytest.mark.extended
def test_other_data_of_the_same_size_is_named_and_a_checkpoint_without_a_digest_resumes(tmp_path, finished, caplog):
    finished(tmp_path)
    run(tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert "train_dataset" not in caplog.text
    others = Dataset.from_list([{"prompt": f"{i % 7}=", "completion": str(i % 10)} for i in range(32)])
    run(tmp_path, data=others, max_steps=4).train(resume_from_checkpoint=True)
    assert caplog.text.count("train_dataset") == 1
    file = tmp_path / "checkpoint-4/lowpeak_state.json"
    state = json.loads(file.read_text())
    del state["cursor"]["digest"]
    file.write_text(json.dumps(state))
    sign_again(file.parent)
    run(tmp_path, max_steps=5).train(resume_from_checkpoint=True)
    assert caplog.text.count("train_dataset") == 1
