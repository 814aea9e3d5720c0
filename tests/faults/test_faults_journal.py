"""The journal of a killed run can be read, and the run that goes on doubles no line of it."""

from __future__ import annotations

import shutil

import pandas
import polars
import pytest
from fault_kills import run_killed_in_training
from fault_runs import STANDARD, run_resumed

from child_processes import KILLED, call, succeed

READERS = {
    "pandas": lambda path: pandas.read_json(path, lines=True).to_dict("records"),
    "polars": lambda path: polars.read_ndjson(path, infer_schema_length=None).to_dicts(),
}


@pytest.fixture(scope="module")
def journals(tmp_path_factory):
    """The journal's folder as a kill in step 6 leaves it, and as the run does that goes on after one in the middle of a line."""
    place = tmp_path_factory.mktemp("journal")
    assert call(run_killed_in_training, STANDARD, place, 5) == KILLED
    shutil.copytree(place / "run/journal", place / "killed")
    for name in ("steps", "rollouts"):
        with (place / f"run/journal/{name}.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')
    succeed(run_resumed, STANDARD, place)
    return {"killed": place / "killed", "resumed": place / "run/journal"}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize(("which", "num_steps", "num_rollouts"), [("killed", 5, 3), ("resumed", 8, 4)])
def test_both_files_are_read_and_no_line_stands_twice(journals, read, which, num_steps, num_rollouts):
    steps = read(journals[which] / "steps.jsonl")
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    assert all({"loss", "grad_norm", "entropy", "time/train", "peak_memory/train"} <= row.keys() for row in steps)
    assert all(row["peak_memory/train"] > 0 for row in steps)
    rows = read(journals[which] / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [1 + 2 * (i // 8) for i in range(8 * num_rollouts)]
    assert {"group", "prompt", "completion", "ones", "short", "reward", "advantage", "finish_reason"} <= rows[0].keys()
    assert [row["reward"] for row in rows] == pytest.approx(
        [row["ones"] + (row["short"] or 0) for row in map(known, rows)]
    )


def known(row):
    """pandas reads null as NaN, which is not equal to itself."""
    return {name: None if value != value else value for name, value in row.items()}
