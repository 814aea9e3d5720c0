"""The self-test's table: each row in a process of its own, none of which can stop or outlast the others."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lowpeak.selftest import all_rows, run_rows

HERE = Path(__file__).parent
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Whether no row failed, the result and numbers of each, all that was said, and the process that the row that hangs started."""
    child = tmp_path_factory.mktemp("selftest") / "child"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[2] / "src")]))
        patch.setenv("SELFTEST_CHILD", str(child))
        rows: dict[str, object] = {}
        patch.setattr("lowpeak.selftest.table._ROWS", rows)
        __import__("selftest_rows")
        sys.modules.pop("selftest_rows")
        said: list[str] = []
        ok = run_rows(list(rows.values()), "cpu", said.append)
    cells = [re.fullmatch(r"\| (.+) \| (.+) \| (.+) \|", line) for line in said]
    return ok, {found[1]: (found[2], found[3]) for found in cells if found}, said, int(child.read_text())


@pytest.mark.parametrize(
    ("name", "result", "numbers"),
    [
        ("works", "ok", r"cpu, 0 / files; \d+ s"),
        ("is wrong", "FAILED", r"1 is not 2; \d+ s"),
        ("breaks", "FAILED", r"ValueError: no such number; \d+ s"),
        ("dies", "FAILED", r"ended by SIGSEGV; \d+ s"),
        ("leaves", "FAILED", r"ended with status 3: last words; \d+ s"),
        ("hangs", "FAILED", r"did not end in its time; \d+ s"),
        ("lacks", "not run", "needs 2 GPUs"),
    ],
)
def test_however_a_row_ends_it_is_one_line_with_the_reason(outcome, name, result, numbers):
    assert outcome[1][name][0] == result
    assert re.fullmatch(numbers, outcome[1][name][1]), outcome[1][name]


def test_totals_and_the_output_of_failed_rows_come_after_the_table_and_what_a_row_started_ends_with_it(outcome):
    ok, rows, said, child = outcome
    assert not ok
    assert len(rows) == 7
    assert any(re.fullmatch(r"\n1 ok, 5 failed, 1 not run, in \d+ s", line) for line in said)
    assert any(re.search(r"last output of is wrong:\n(.*\n)*what it printed", line) for line in said)
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_rows_that_there_is_no_time_for_are_not_run():
    said: list[str] = []
    assert run_rows([replace(all_rows()[0], needs=())], "cpu", said.append, limit=0.0)
    assert said[1] == "| log-prob kernels | not run | the time limit of the self-test was reached |"


def test_the_page_about_gpus_lists_every_row_and_what_it_needs():
    listed = re.findall(
        r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", (DOCS / "gpus.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [(name, needs) for name, _, needs in listed] == [(each.name, ", ".join(each.needs)) for each in all_rows()]


def test_what_the_docs_say_was_not_run_on_a_gpu_has_a_row():
    names = {each.name for each in all_rows()}
    pages = [page for page in DOCS.rglob("*.md") if page.name != "log.md"]
    texts = [text for page in pages for text in re.split(r"\n\n|\n\|", page.read_text(encoding="utf-8"))]
    not_run = [text for text in texts if re.search(r"not\s+run\s+on\s+(a\s+GPU|one)\b", text, re.IGNORECASE)]
    assert len(not_run) >= 4
    assert [text for text in not_run if not names & set(re.findall(r"`([^`]+)`", text))] == []
