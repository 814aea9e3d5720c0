"""`resume_from_checkpoint="auto"`: one script for the first start, every restart, and a run that has ended."""

from __future__ import annotations

import shutil

import pytest
from datasets import Dataset, IterableDataset

from case_selection import mark_extended
from file_damage import harm
from lowpeak.errors import ArgumentError, CheckpointError
from lowpeak.journal import read_steps
from small_runs import KINDS, SAVED, StopAfter, make, rows, saved, spread, weights
from tiny_models import tiny_model

AUTO = {**SAVED, "max_steps": 3, "resume_from_checkpoint": "auto"}


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lowpeak.lock"]
    return {path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def equal(some, others):
    return some.keys() == others.keys() and all(some[name].equal(others[name]) for name in some)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A GRPO run that was stopped after two of its three steps."""
    folder = tmp_path_factory.mktemp("stopped")
    make("GRPO", folder, callbacks=[StopAfter(2)], **AUTO).train()
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.mark.parametrize("kind", mark_extended(KINDS, ["GRPO", "PPO", "SFT"], "release"))
def test_the_same_script_starts_resumes_and_finds_its_run_finished(tmp_path, kind, caplog):
    alone = make(kind, tmp_path / "alone", **{**AUTO, "resume_from_checkpoint": None})
    alone.train()
    make(kind, tmp_path / "run", callbacks=[StopAfter(2)], **AUTO).train()
    make(kind, tmp_path / "run", **AUTO).train()
    assert [row["step"] for row in read_steps(tmp_path / "run/journal")] == [1, 2, 3]
    before = contents(tmp_path / "run")
    assert " is finished" not in caplog.text
    last = make(kind, tmp_path / "run", **AUTO)
    assert last.train().global_step == 3
    assert last.was_finished
    assert "3 steps" in caplog.text
    assert contents(tmp_path / "run") == before
    assert equal(weights(last), weights(alone))


OTHER_ROWS = Dataset.from_list([{"prompt": f"{i % 7}=", "answer": str(i % 10)} for i in range(16)])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"beta": 0.5}, r"beta was 0\.0 and is 0\.5"),
        ({"max_steps": 4}, r"max_steps was 3 and is 4"),
        ({"learning_rate": 0.5}, r"learning_rate was 0\.01 and is 0\.5"),
        ({"reward_funcs": spread}, r"reward_funcs was \['ones'\] and is \['spread'\]"),
        ({"per_device_train_batch_size": 16}, r"completions of a rollout was 8 and is 16"),
        ({"data": OTHER_ROWS}, r"train_dataset was 'rows with digest \w+' and is "),
        ({"data": rows(15)}, r"train_dataset was "),
    ],
)
def test_other_arguments_and_other_data_are_an_error_that_leaves_the_folder_as_it_was(folder, changes, named):
    before = contents(folder)
    with pytest.raises(CheckpointError, match=rf"'auto': .*checkpoint-2 .*{named}.*output_dir"):
        make("GRPO", folder, **{**AUTO, **changes}).train()
    assert contents(folder) == before


def test_other_columns_of_a_stream_and_another_model_are_an_error(tmp_path):
    def stream(column):
        data = [{"prompt": "12=", column: "1"}] * 8
        return IterableDataset.from_generator(lambda: iter(data), features=Dataset.from_list(data).features)

    small, other = (saved(tmp_path / name, tiny_model()) for name in ("small", "other"))
    make("GRPO", tmp_path / "run", small, stream("a"), callbacks=[StopAfter(2)], **AUTO).train()
    for model, column, named in ((small, "b", "train_dataset was"), (other, "a", "model was 'small' and is 'other'")):
        with pytest.raises(CheckpointError, match=rf"'auto': .*{named}"):
            make("GRPO", tmp_path / "run", model, stream(column), **AUTO).train()


def test_a_damaged_checkpoint_is_named_and_an_older_whole_one_is_resumed(folder, caplog):
    harm(folder / "checkpoint-2/optimizer.pt", "flipped")
    run = make("GRPO", folder, **AUTO)
    run.train()
    assert "checkpoint-2 is not used" in caplog.text
    assert "checkpoint-2/optimizer.pt is damaged" in caplog.text
    assert [row["step"] for row in read_steps(folder / "journal")] == [1, 2, 3]
    assert (folder / "earlier-1/checkpoint-2").is_dir()


def test_only_damaged_checkpoints_are_an_error_and_never_a_new_run(folder):
    harm(folder / "checkpoint-2/optimizer.pt", "flipped")
    (folder / "checkpoint-1/lowpeak_state.json").unlink()  # as in a copy that was cut off
    before = contents(folder)
    with pytest.raises(CheckpointError, match=r" 2 .*checkpoint-1/lowpeak_state\.json"):
        make("GRPO", folder, **AUTO).train()
    assert contents(folder) == before


def test_checkpoints_without_a_state_cannot_be_resumed_and_are_refused_at_the_first_start(tmp_path):
    with pytest.raises(ArgumentError, match=r"resume_from_checkpoint='auto'.*save_only_model"):
        make("GRPO", tmp_path, save_only_model=True, **AUTO)


@pytest.mark.parametrize(
    ("in_config", "argument", "steps"),
    [
        ("true", None, [1, 2, 3]),
        (True, None, [1, 2, 3]),
        ("{folder}/checkpoint-1", None, [1, 2, 3]),
        (None, "auto", [1, 2, 3]),
        ("false", "true", [1, 2, 3]),
        ("false", None, [1]),
        ("auto", False, [1]),
    ],
)
def test_the_argument_of_train_acts_else_that_of_the_config(folder, in_config, argument, steps):
    in_config = in_config.format(folder=folder) if isinstance(in_config, str) else in_config
    run = make("GRPO", folder, **{**AUTO, "resume_from_checkpoint": in_config}, callbacks=[StopAfter(steps[-1])])
    run.train(resume_from_checkpoint=argument)
    assert [row["step"] for row in read_steps(folder / "journal")] == steps
