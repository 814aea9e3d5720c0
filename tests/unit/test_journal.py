"""The journal's files stay readable, complete and without duplicates, however the run ends."""

import itertools
import json
import math
import shutil
import subprocess
import sys

import numpy
import pandas
import polars
import pytest
import torch

from lowpeak.errors import CheckpointError
from lowpeak.journal import Journal, read_rows, read_steps, read_tool_results


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_run(folder, num_steps, **row):
    journal = Journal(folder)
    for step in range(1, num_steps + 1):
        journal.write_step(step, row)
        journal.write_rollout(step, [{"completion": "a"}, {"completion": "b"}])
    return journal


def test_steps_are_read_as_they_were_written(tmp_path):
    journal = Journal(tmp_path / "run")
    journal.sync()
    assert read_steps(tmp_path / "run") == []
    assert not (tmp_path / "run").exists()
    rows = [{"reward": 0.1 + 0.2, "phases": {"train": {"seconds": 1.5}}, "name": 'ü\n"x"'}, {"reward": 1.0, "ok": True}]
    for step, row in enumerate(rows, start=1):
        journal.write_step(step, row)
    journal.sync()
    assert read_steps(tmp_path / "run") == [{"step": step, **row} for step, row in enumerate(rows, start=1)]


def test_the_journals_step_wins_over_one_in_the_row(tmp_path):
    row = {"loss": 1.0, "step": 99}
    Journal(tmp_path).write_step(3, row)
    assert read_steps(tmp_path) == [{"step": 3, "loss": 1.0}]
    assert row["step"] == 99


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, None),
        (-math.inf, None),
        (numpy.float32(0.5), 0.5),
        (numpy.float64(math.nan), None),
        (numpy.int64(7), 7),
        (numpy.bool_(True), True),
        (numpy.array([1.5, math.nan]), [1.5, None]),
        (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (torch.tensor(math.inf), None),
        ((1.0, None, math.nan), [1.0, None, None]),
        ({1: {"a": math.nan}}, {"1": {"a": None}}),
        (2**63 - 1, 2**63 - 1),
        (2**64, str(2**64)),
        (torch.float32, "torch.float32"),
        ({3}, "{3}"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
    ],
)
def test_any_value_becomes_json_that_readers_take(tmp_path, value, written):
    Journal(tmp_path).write_step(1, {"value": value})
    assert read_steps(tmp_path) == [{"step": 1, "value": written}]
    assert len(pandas.read_json(tmp_path / "steps.jsonl", lines=True)) == 1
    assert len(polars.read_ndjson(tmp_path / "steps.jsonl", infer_schema_length=None)) == 1


def test_pandas_and_polars_read_both_files_as_tables(tmp_path):
    journal = Journal(tmp_path)
    for step in range(1, 301):
        late = {"eval_reward": 0.5} if step > 200 else {}
        journal.write_step(step, {"reward": math.nan if step < 150 else 1.0, "step_time": 2.5, **late})
        journal.write_rollout(step, [{"prompt": [{"role": "user", "content": "1+1"}], "rewards": {"a": None, "b": 1}}])
    for name in ("steps", "rollouts"):
        path = tmp_path / f"{name}.jsonl"
        assert pandas.read_json(path, lines=True)["step"].tolist() == list(range(1, 301))
        assert polars.read_ndjson(path, infer_schema_length=None)["step"].to_list() == list(range(1, 301))
    table = pandas.read_json(tmp_path / "steps.jsonl", lines=True)
    assert table["reward"].isna().sum() == 149
    assert table["step_time"].tolist() == [2.5] * 300
    assert polars.read_ndjson(tmp_path / "steps.jsonl", infer_schema_length=None)["eval_reward"].null_count() == 200


def test_a_resumed_run_goes_on_without_doubling_or_losing_a_step(tmp_path):
    write_run(tmp_path, 5, run="first")
    resumed = Journal(tmp_path)
    resumed.resume_at(3)
    for step in (4, 5, 6):
        resumed.write_step(step, {"run": "second"})
        resumed.write_rollout(step, [{"completion": "c"}])
    assert [row["step"] for row in read_steps(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [row["run"] for row in read_steps(tmp_path)] == ["first"] * 3 + ["second"] * 3
    assert [row["step"] for row in lines(tmp_path / "rollouts.jsonl")] == [1, 1, 2, 2, 3, 3, 4, 5, 6]
    assert names(tmp_path) == ["rollouts.jsonl", "steps.jsonl"]


def test_a_resumed_run_loses_later_tokens_and_evaluations_and_keeps_every_event(tmp_path):
    journal = write_run(tmp_path, 3)
    for step in (1, 2, 3):
        journal.write_tokens(step, [{"row": 0}])
        journal.write_evaluation(step, {"eval_reward": 0.5})
        journal.write_event(step, "engine lost", error="gone")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step":4,"ev')
    resumed = Journal(tmp_path)
    resumed.resume_at(2)
    resumed.write_event(2, "resumed", restarts=1)
    assert [row["step"] for row in read_rows(tmp_path, "tokens")] == [1, 2]
    assert list(read_rows(tmp_path, "evaluations"))[-1] == {"step": 2, "eval_reward": 0.5}
    events = list(read_rows(tmp_path, "events"))
    assert [(row["step"], row["event"]) for row in events] == [*((s, "engine lost") for s in (1, 2, 3)), (2, "resumed")]
    assert events[0]["error"] == "gone"
    assert events[-1]["time"] >= events[0]["time"] > 1e9


@pytest.mark.parametrize(
    "torn",
    [
        *(b'{"step":3,"rew', b"{", b'{"step":3,"reward":1.0}', b"\0\0\0\0", b'"\n', b"\xff\xfe\n"),
        *(b'{"step":%s}\n' % step for step in (b"null", b'"3"', b"1.5", b"true", b"[3]", b"NaN", b"[" * 100_000)),
    ],
)
def test_a_torn_or_damaged_line_is_left_out_when_read_and_gone_when_resumed(tmp_path, caplog, torn):
    write_run(tmp_path, 2, reward=1 / 3)
    whole = (tmp_path / "steps.jsonl").read_bytes()
    (tmp_path / "steps.jsonl").write_bytes(whole + torn)
    assert [row["step"] for row in read_steps(tmp_path)] == [1, 2]
    assert f"{tmp_path / 'steps.jsonl'}: line 3 " in caplog.text
    journal = Journal(tmp_path)
    journal.resume_at(2)
    assert (tmp_path / "steps.jsonl").read_bytes() == whole
    journal.write_step(3, {})
    assert [row["step"] for row in lines(tmp_path / "steps.jsonl")] == [1, 2, 3]


def test_a_new_run_in_the_same_folder_moves_the_old_journals_next_to_it(tmp_path):
    for run in ("first", "second", "third"):
        write_run(tmp_path / "journal", 2, run=run)
    assert names(tmp_path) == ["earlier-1", "earlier-2", "journal"]
    for run, folder in (("first", "earlier-1/"), ("second", "earlier-2/"), ("third", "")):
        assert names(tmp_path / folder / "journal") == ["rollouts.jsonl", "steps.jsonl"]
        assert [row["run"] for row in read_steps(tmp_path / folder / "journal")] == [run] * 2


def test_an_old_journal_is_moved_to_the_folder_of_its_checkpoints(tmp_path):
    write_run(tmp_path / "journal", 1)
    (tmp_path / "earlier-9" / "journal").mkdir(parents=True)
    (tmp_path / "earlier-10" / "checkpoint-1").mkdir(parents=True)
    Journal(tmp_path / "journal").write_step(1, {})
    assert names(tmp_path / "earlier-10") == ["checkpoint-1", "journal"]


def test_a_second_run_of_one_journal_begins_new_files_and_a_resumed_one_continues(tmp_path):
    journal = write_run(tmp_path / "journal", 3, run="first")
    journal.begin_run()
    journal.write_step(1, {"run": "second"})
    journal.begin_run()
    journal.resume_at(1)
    journal.write_step(2, {"run": "third"})
    assert [row["run"] for row in read_steps(tmp_path / "journal")] == ["second", "third"]
    assert [row["run"] for row in read_steps(tmp_path / "earlier-1" / "journal")] == ["first"] * 3


def test_a_journal_that_writes_nothing_leaves_the_old_one_in_place(tmp_path):
    write_run(tmp_path, 2)
    Journal(tmp_path)
    assert names(tmp_path) == ["rollouts.jsonl", "steps.jsonl"]


@pytest.mark.parametrize("torn", ["x", "x" * 200_000])
def test_a_moved_journal_loses_its_torn_line(tmp_path, torn):
    journal = tmp_path / "journal"
    write_run(journal, 2)
    whole = (journal / "steps.jsonl").read_text()
    (journal / "steps.jsonl").write_text(whole + torn)
    (journal / "rollouts.jsonl").write_text(torn)
    Journal(journal).write_step(1, {})
    assert (tmp_path / "earlier-1/journal/steps.jsonl").read_text() == whole
    assert names(tmp_path / "earlier-1/journal") == ["steps.jsonl"]


@pytest.fixture
def small_files(monkeypatch):
    """Files are full at 200 bytes: after two or three rollouts of `write_run`."""
    monkeypatch.setattr("lowpeak.journal._FULL_FILE", 200)


def test_files_are_bounded_whole_rollouts_in_the_order_of_their_names(tmp_path, small_files):
    write_run(tmp_path, 20)
    paths = sorted(tmp_path.glob("rollouts*"))
    assert [path.name for path in paths[:2]] == ["rollouts.00001.jsonl", "rollouts.00002.jsonl"]
    assert (len(paths), paths[-1].name) == (7, "rollouts.jsonl")
    assert max(path.stat().st_size for path in paths) < 200 + 2 * 50
    found = [pandas.read_json(path, lines=True)["step"].tolist() for path in paths]
    assert [*itertools.chain(*found)] == [step for step in range(1, 21) for _ in range(2)]
    assert not any({*one} & {*other} for one, other in itertools.pairwise(found))
    assert [row["step"] for row in read_rows(tmp_path, "rollouts")] == [*itertools.chain(*found)]


@pytest.mark.parametrize("step", [0, 3, 9, 10, 20])
@pytest.mark.parametrize("killed_at", ["a line", "the name of a full file"])
def test_a_resumed_run_loses_later_lines_of_all_files(tmp_path, small_files, step, killed_at):
    write_run(tmp_path, 20)
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step":21,"comp')
    if killed_at != "a line":
        (tmp_path / "rollouts.jsonl").rename(tmp_path / "rollouts.00007.jsonl")
    journal = Journal(tmp_path)
    journal.resume_at(step)
    assert all(path.stat().st_size for path in tmp_path.iterdir())
    journal.write_rollout(step + 1, [{"completion": "new"}])
    assert [row["step"] for row in read_rows(tmp_path, "rollouts")][-3:] == ([step] * 2 + [step + 1])[-1 - 2 * step :]


def test_a_new_file_replaces_none_that_is_left_when_others_were_removed(tmp_path, small_files):
    write_run(tmp_path, 20)
    (tmp_path / "rollouts.00001.jsonl").unlink()
    journal = Journal(tmp_path)
    journal.resume_at(20)
    for step in range(21, 25):
        journal.write_rollout(step, [{"completion": "x" * 200}])
    assert [row["step"] for row in read_rows(tmp_path, "rollouts")][-10:] == [18, 18, 19, 19, 20, 20, 21, 22, 23, 24]


def test_a_resumed_run_finds_the_tools_results_of_the_rollout_that_was_cut_off(tmp_path):
    journal = Journal(tmp_path)
    call = {"name": "add", "arguments": {"a": 1, "b": 2}, "seconds": 0.5}
    for step, key, outcome in ((1, "k0", "old"), (3, "k1", "3"), (3, "k2", "4")):
        journal.write_tool_result(step, {"key": key, **call, "result": outcome})
    journal.write_tool_result(3, {"key": "k3", **call, "error": "ZeroDivisionError: division by zero"})
    with (tmp_path / "tool_results.jsonl").open("a") as file:
        file.write('{"step":3,"key":"k4","res')
    other_rank = Journal(tmp_path, rank=1)
    other_rank.write_tool_result(3, {"key": "k5", **call, "result": "5"})
    other_rank.write_step(3, {})
    with (tmp_path / "tool_results-rank1.jsonl").open("a") as file:
        file.write('{"step":3,"key":"k6","res')
    Journal(tmp_path).resume_at(2)
    assert (tmp_path / "tool_results-rank1.jsonl").read_bytes().endswith(b"\n")
    results = read_tool_results(tmp_path, after=2)
    assert [*results] == ["k1", "k2", "k3", "k5"]
    assert results["k1"] == {"step": 3, "key": "k1", **call, "result": "3"}
    assert results["k3"]["error"] == "ZeroDivisionError: division by zero"


FILL_THE_DISK = """
import resource, sys
from pathlib import Path
from lowpeak.errors import CheckpointError
from lowpeak.journal import Journal

journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
try:
    for step in range(1, 100):
        journal.write_step(step, {"text": "x" * 990})
except CheckpointError as error:
    print(error)
"""


def test_a_line_that_the_disk_cuts_short_is_taken_back_and_said(tmp_path):
    command = [sys.executable, "-c", FILL_THE_DISK, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"{tmp_path}: File too large" in output
    assert [row["step"] for row in lines(tmp_path / "steps.jsonl")] == list(range(1, 10))


def test_a_folder_that_is_removed_during_the_run_is_told_once(tmp_path, caplog):
    journal = Journal(tmp_path / "run" / "journal")
    journal.resume_at(0)
    journal.write_step(1, {})
    assert not caplog.records
    shutil.rmtree(tmp_path / "run")
    journal.write_step(2, {})
    journal.write_step(3, {})
    (warning,) = caplog.records
    assert warning.args[0] == tmp_path / "run"
    assert warning.args[-1] == 2
    assert [row["step"] for row in read_steps(tmp_path / "run" / "journal")] == [2, 3]


@pytest.mark.parametrize("name", ["steps.jsonl", "rollouts.jsonl", "steps.jsonl.new"])
def test_no_file_is_written_through_a_link(tmp_path, name):
    target = tmp_path / "target"
    target.write_text("precious")
    journal = write_run(tmp_path / "run", 2)
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(target)
    error = pytest.raises(CheckpointError, match=rf"{name} ")
    if name == "steps.jsonl.new":
        with error:
            Journal(tmp_path / "run").resume_at(1)
    else:
        with error:
            Journal(tmp_path / "run").begin_run()
        with error:
            journal.write_step(3, {})
            journal.write_rollout(3, [{}])
    assert target.read_text() == "precious"


def test_what_has_the_place_of_the_journals_files_is_told_with_what_to_do(tmp_path):
    Journal(tmp_path / "none").begin_run()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        Journal(tmp_path / "file").begin_run()
    (tmp_path / "run" / "rollouts.jsonl").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"run/rollouts\.jsonl"):
        Journal(tmp_path / "run").begin_run()
    with pytest.raises(CheckpointError, match=r"file.*output_dir"):
        Journal(tmp_path / "file").write_step(1, {})
