"""A checkpoint is resumed by the run that wrote it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache

import pytest
from datasets import Dataset

from lowpeak.checkpoint.run_state import RolloutInFlight, check_run_identity
from lowpeak.errors import ArgumentError, CheckpointError
from lowpeak.journal import read_steps
from lowpeak.setup.resume import check_checkpoint_name
from small_runs import SAVED, make, spread, supervised_rows
from tiny_models import tiny_model


def run(tmp_path, kind="GRPO", *, hidden=32, layers=2, **changes):
    return make(kind, tmp_path, tiny_model(hidden=hidden, layers=layers), **{**SAVED, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Give copies of finished GRPO runs: by changes one run for all tests."""

    @cache
    def train(changes):
        folder = tmp_path_factory.mktemp("finished")
        run(folder, **dict(changes)).train()
        return folder

    def copy(folder, **changes):
        shutil.copytree(train(tuple(changes.items())), folder, dirs_exist_ok=True)

    return copy


def saved_state(run):
    """A run's state as a checkpoint has it."""
    state = run.run_state()
    return replace(state, identity=json.loads(json.dumps(state.identity)))


def test_another_algorithm_is_refused_and_other_rewards_are_a_warning(tmp_path, caplog):
    saved = saved_state(run(tmp_path))
    for kind in ("RLOO", "SFT"):
        with pytest.raises(CheckpointError, match=rf"algorithm .*'grpo' .*'{kind.lower()}'"):
            check_run_identity(saved, run(tmp_path, kind).run_state(), tmp_path)
    check_run_identity(saved, run(tmp_path, reward_funcs=spread).run_state(), tmp_path)
    assert re.search(r"reward_funcs .*'ones'.*'spread'", caplog.text)


@pytest.mark.parametrize("changed", [{"num_iterations": 3}, {"steps_per_generation": 2}])
def test_a_used_rollout_is_not_extended_when_rollouts_get_more_steps(tmp_path, finished, changed):
    finished(tmp_path)
    run(tmp_path, **changed, max_steps=4).train(resume_from_checkpoint=True)
    rows = [json.loads(line) for line in (tmp_path / "journal/rollouts.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3}


def test_a_resume_within_a_rollout_refuses_another_shape_of_rollouts(tmp_path, finished):
    finished(tmp_path, num_iterations=3)
    with pytest.raises(CheckpointError, match=r"num_iterations .*3.*2"):
        run(tmp_path, num_iterations=2).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r" 8 .* 16"):
        run(tmp_path, num_iterations=3, per_device_train_batch_size=16).train(resume_from_checkpoint=True)


def test_a_resume_refuses_a_checkpoint_with_rollouts_in_flight(tmp_path, monkeypatch):
    writer = run(tmp_path, max_steps=1)
    present = writer.run_state
    in_flight = (RolloutInFlight(1, 1, {}, 2, ()),)
    monkeypatch.setattr(writer, "run_state", lambda: replace(present(), in_flight=in_flight))
    writer.train()
    with pytest.raises(CheckpointError, match=r"checkpoint-1 .*\(1\)"):
        run(tmp_path, max_steps=2).train(resume_from_checkpoint=True)


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lowpeak.lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_a_resume_that_fails_leaves_the_folder_as_it_was(tmp_path, finished):
    finished(tmp_path)
    before, first = contents(tmp_path), str(tmp_path / "checkpoint-1")
    message = {
        r"checkpoint-1 .* momentum.*optim, optim_args ": {"optim": "sgd"},
        r"checkpoint-1 .*embed_tokens.* model, ": {"hidden": 64},
        r"checkpoint-1 .*they lack model\.layers\.2\..*9 more.* model, ": {"layers": 3},
        r"checkpoint-1 .*model lacks model\.layers\.1\..*9 more.* model, ": {"layers": 1},
    }
    for pattern, changes in message.items():
        with pytest.raises(CheckpointError, match=pattern):
            run(tmp_path, **changes).train(resume_from_checkpoint=first)
        assert contents(tmp_path) == before


@pytest.mark.extended
def test_a_checkpoint_named_after_another_step_is_an_error_and_is_not_moved(tmp_path, finished):
    finished(tmp_path)
    renamed = (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-7")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint-7 .* 1.* checkpoint-1"):
        run(tmp_path).train(resume_from_checkpoint=str(renamed))
    assert contents(tmp_path) == before
    check_checkpoint_name(renamed, tmp_path / "elsewhere", 1)


def test_arguments_that_a_checkpoints_states_overrule_are_named_in_one_warning(tmp_path, caplog):
    changed = {"learning_rate": 0.25, "weight_decay": 0.5, "adam_beta2": 0.75, "adam_epsilon": 0.125}
    first = {"learning_rate": 0.0625, "weight_decay": 0.0, "adam_beta2": 0.5, "adam_epsilon": 0.25}
    first["value_learning_rate"], changed["value_learning_rate"] = 0.03125, 0.5
    run(tmp_path, "PPO", **first, max_steps=1).train()
    run(tmp_path, "PPO", **first, max_steps=2).train(True)
    assert " acts)" not in caplog.text
    with pytest.raises(ArgumentError, match=r"learning_rate=0.25"):
        run(tmp_path, "PPO", **changed, max_steps=3, strict_arguments=True).train(True)
    last = run(tmp_path, "PPO", **changed, max_steps=3)
    last.train(True)
    (message,) = [record.getMessage() for record in caplog.records if " acts)" in record.getMessage()]
    named = re.findall(r"(\w+)=([\d.]+) \(([\d.]+) acts\)", message)
    assert sorted(named) == sorted((key, str(changed[key]), str(first[key])) for key in first)
    assert last.lr_scheduler.base_lrs[0] == 0.0625


@pytest.mark.extended
def test_numbers_of_other_optimizers_and_schedules_are_named_too(tmp_path, caplog):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}
    evaluated = {"metric_for_best_model": "loss", "eval_dataset": supervised_rows()}
    settings = {"optim": "sgd", **plateau, **evaluated}
    run(tmp_path, "SFT", **settings, optim_args="momentum=0.5", max_steps=1).train()
    changed = {"optim_args": "momentum=0.75", "lr_scheduler_kwargs": {"patience": 3}, "max_steps": 2}
    run(tmp_path, "SFT", **settings, **changed).train(True)
    assert "optim's momentum=0.75 (0.5 acts); lr_scheduler_kwargs' patience=3 (10 acts)" in caplog.text


OTHERS = {
    "GRPO": {"beta": 0.5, "loss_type": "grpo", "temperature": 0.5, "scale_rewards": "none", "max_completion_length": 3},
    "PPO": {"kl_target": 0.25, "lam": 0.5, "missing_eos_penalty": 1.0},
    "OnlineDPO": {"beta": [0.25], "loss_type": "ipo"},
    "SFT": {"max_length": 8, "per_device_train_batch_size": 4},
}
SHARED_OTHERS = {"lr_scheduler_type": "cosine", "warmup_steps": 1.0, "max_grad_norm": 0.5, "max_steps": 3}
UNNAMED = {"logging_steps": 5, "micro_batch_tokens": 64, "save_total_limit": 3, "logprob_chunk_size": 8}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_arguments_that_change_what_is_learned_are_named_in_one_warning(tmp_path, kind, caplog):
    others = {**SHARED_OTHERS, **OTHERS[kind]}
    saved = saved_state(run(tmp_path, kind))
    check_run_identity(saved, run(tmp_path, kind, **UNNAMED).run_state(), tmp_path)
    now = run(tmp_path, kind, **UNNAMED, **others).run_state()
    algorithm = {"algorithm": saved.identity["algorithm"]}
    check_run_identity(replace(saved, identity=algorithm), now, tmp_path)  # an earlier version saved no more
    assert " was " not in caplog.text
    check_run_identity(saved, now, tmp_path)
    (message,) = [record.getMessage() for record in caplog.records if " was " in record.getMessage()]
    renamed = {"per_device_train_batch_size": "rows of a step"}
    assert sorted(re.findall(r"([a-z_ ]+) was ", message)) == sorted(f" {renamed.get(name, name)}" for name in others)
    assert "max_grad_norm was 1.0 and is 0.5" in message
    assert "lr_scheduler_type was 'linear' and is 'cosine'" in message


@pytest.mark.extended
def test_other_data_of_the_same_size_is_named_and_a_position_without_a_digest_is_taken(tmp_path, finished, caplog):
    finished(tmp_path)
    run(tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert "train_dataset" not in caplog.text
    assert caplog.text.count(" was ") == caplog.text.count("max_steps was 2 and is 3") == 1
    others = Dataset.from_list([{"prompt": f"{i % 7}=", "answer": str(i % 10)} for i in range(16)])
    last = run(tmp_path, data=others, max_steps=4)
    last.train(resume_from_checkpoint=True)
    assert caplog.text.count("train_dataset") == 1
    assert len(read_steps(tmp_path / "journal")) == 4
    state = last.run_state()
    of_earlier_version = replace(state, cursor={**state.cursor, "digest": None})
    check_run_identity(of_earlier_version, run(tmp_path, max_steps=4).run_state(), tmp_path)
    assert caplog.text.count("train_dataset") == 1
