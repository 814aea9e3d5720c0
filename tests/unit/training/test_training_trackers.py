"""Completions as tables in trackers: each real tracker of `report_to` keeps the rows of the journal, without a network."""

from __future__ import annotations

import json
import logging
import os
import sqlite3

import pytest
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from child_processes import call
from lowpeak.training.completion_tables import track_completions
from small_runs import trained

pytestmark = pytest.mark.extended

ROWS = [
    {"group": 0, "prompt": "1|<b>", "completion": "a\nb", "rewards": {"right": 1.0}, "reward": 1.0, "advantage": 0.5},
    {"group": 0, "prompt": "1|<b>", "completion": "c", "rewards": {"right": None}, "reward": 0.0, "advantage": -0.5},
    {"group": 1, "prompt": [{"role": "user", "content": "2"}], "completion": [{"role": "assistant", "content": "d"}],
     "rewards": {"right": 0.0}, "reward": 0.0, "advantage": 0.0},
]  # fmt: skip


def with_all_trackers(trackers, place):
    places = {"WANDB_MODE": "offline", "WANDB_DIR": str(place), "TRACKIO_DIR": str(place / "trackio")}
    os.environ.update({**places, "WANDB_SILENT": "true"})
    trained("GRPO", place / "run", report_to=list(trackers), log_completions=True, log_unique_prompts=True, project="p")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    assert call(with_all_trackers, ("wandb", "trackio", "tensorboard"), folder) == 0, (folder / "log").read_text()
    return folder


@pytest.fixture(scope="module")
def kept(tracked):
    """Of each step, the first completion of each prompt in the journal, as the columns of a table."""
    lines = [json.loads(line) for line in (tracked / "run" / "journal" / "rollouts.jsonl").read_text().splitlines()]
    firsts = {(line["step"], line["group"]): line for line in reversed(lines)}
    columns = ("step", "prompt", "completion", "reward", "advantage")
    found = [{name: line[name] for name in columns} for line in firsts.values()]
    return sorted(found, key=lambda row: (row["step"], str(row["prompt"])))


def same_rows(found, kept):
    chosen = [{name: row[name] for name in kept[0]} for row in found]
    return sorted(chosen, key=lambda row: (row["step"], str(row["prompt"]))) == kept


def test_wandb_has_a_table_of_each_step(tracked, kept):
    tables = [json.loads(path.read_text()) for path in tracked.glob("wandb/offline*/files/media/table/completions_*")]
    assert len(tables) == 2
    assert same_rows([dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]], kept)


def test_trackio_has_a_table_of_each_step(tracked, kept):
    with sqlite3.connect(tracked / "trackio" / "p.db") as database:
        logged = [json.loads(metrics) for (metrics,) in database.execute("select metrics from metrics order by id")]
    tables = [each["completions"]["_value"] for each in logged if "completions" in each]
    assert len(tables) == 2
    assert same_rows([row for table in tables for row in table], kept)


def test_tensorboard_has_a_table_of_each_step(tracked, kept):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((tracked / "run" / "runs").iterdir())), size_guidance={"tensors": 0})
    events.Reload()
    tables = events.Tensors("completions/text_summary")
    assert [table.step for table in tables] == [1, 2]
    for table in tables:
        lines = table.tensor_proto.string_val[0].decode().splitlines()
        assert lines[0].startswith("| prompt | completion |")
        assert len(lines) == 2 + sum(row["step"] == table.step for row in kept)


class Writer:
    def __init__(self):
        self.texts = []

    def add_text(self, tag, text, step):
        self.texts.append(text)


def tensorboard_over(writer):
    callback = TensorBoardCallback()
    callback.tb_writer = writer
    return callback


def test_a_cell_shows_its_text_as_it_is():
    writer = Writer()
    track_completions(ROWS, 3, [TrainerCallback(), tensorboard_over(writer)])
    cells = [line.strip("| ").split(" | ") for line in writer.texts[0].splitlines()[2:]]
    assert cells[0] == ["1&#124;&lt;b&gt;", "a<br>b", "1.00", "1.00", "0.50"]
    assert cells[1][2] == "-"
    assert cells[2][:2] == ["user: 2", "d"]


def test_a_reward_and_an_extra_with_the_name_of_a_column_have_a_column_of_their_own():
    writer = Writer()
    named = {"rewards": {"completion": 8.0, "step": 1.0, "right": 0.0}, "extra": {"right": "r", "note": "n"}}
    track_completions([ROWS[0] | named], 3, [tensorboard_over(writer)])
    heads, _, cells = (line.strip("| ").split(" | ") for line in writer.texts[0].splitlines())
    assert heads == [
        *("prompt", "completion", "rewards/completion", "rewards/step", "right", "reward", "advantage"),
        *("extra/right", "note"),
    ]
    assert cells[1:] == ["a<br>b", "8.00", "1.00", "0.00", "1.00", "0.50", "r", "n"]


def test_a_tracker_that_fails_is_named_and_the_others_get_their_table(caplog):
    class Full(Writer):
        def add_text(self, *more):
            raise OSError("disk full")

    writer = Writer()
    with caplog.at_level(logging.WARNING):
        track_completions(ROWS, 3, [tensorboard_over(Full()), tensorboard_over(writer)], unique=True)
    assert len(writer.texts[0].splitlines()) == 2 + 2
    assert [record.args for record in caplog.records] == [("TensorBoardCallback", 3, "disk full")]
