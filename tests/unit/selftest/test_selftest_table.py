"""The self-test's table: each row in a process of its own, none of which can stop or outlast the others."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lowpeak.errors import ArgumentError
from lowpeak.selftest.table import GROUPS, Selection, all_rows, choose_rows, run_rows, to_json

HERE = Path(__file__).parent
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The JSON document of all rows, the result and text of each, all lines, and the process that the row that hangs started."""
    child = tmp_path_factory.mktemp("selftest") / "child"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[2] / "src")]))
        patch.setenv("SELFTEST_CHILD", str(child))
        rows: dict[str, object] = {}
        patch.setattr("lowpeak.selftest.table._ROWS", rows)
        __import__("selftest_rows")
        sys.modules.pop("selftest_rows")
        lines: list[str] = []
        selection = Selection(list(rows.values()), "cpu", quick=True)
        document = json.loads(to_json({"torch": "2.13"}, selection, run_rows(selection, lines.append)))
    cells = [re.fullmatch(r"\| (.+) \| (.+) \| (.+) \|", line) for line in lines]
    return document, {found[1]: (found[2], found[3]) for found in cells if found}, lines, int(child.read_text())


@pytest.mark.extended
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
        ("takes long", "ok", r"quick; \d+ s"),
    ],
)
def test_however_a_row_ends_it_is_one_line_with_the_reason(outcome, name, result, numbers):
    assert outcome[1][name][0] == result
    assert re.fullmatch(numbers, outcome[1][name][1]), outcome[1][name]


@pytest.mark.extended
def test_totals_and_the_output_of_failed_rows_come_after_the_table_and_what_a_row_started_ends_with_it(outcome):
    document, rows, lines, child = outcome
    assert len(rows) == len(document["rows"]) == 8
    assert any(re.fullmatch(r"\n2 ok, 5 failed, 1 not run, in \d+ s", line) for line in lines)
    assert any(re.search(r"last output of is wrong:\n(.*\n)*what it printed", line) for line in lines)
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.extended
def test_the_document_for_an_issue_has_numbers_seconds_and_the_output_of_failed_rows(outcome):
    document = outcome[0]
    assert (document["environment"], document["device"], document["quick"]) == ({"torch": "2.13"}, "cpu", True)
    rows = {each["row"]: each for each in document["rows"]}
    assert rows["works"]["numbers"] == {"device": "cpu", "share": 0.5, "largest": "inf"}
    assert rows["works"]["seconds"] > 0
    assert not rows["works"]["last_output"]
    assert rows["is wrong"]["numbers"] == {"found": 2}
    assert "what it printed" in rows["is wrong"]["last_output"]
    assert (rows["lacks"]["result"], rows["lacks"]["seconds"]) == ("not run", 0.0)


def test_rows_that_there_is_no_time_for_are_not_run():
    lines: list[str] = []
    (outcome,) = run_rows(Selection([replace(all_rows()[0], needs=())], "cpu", limit=0.0), lines.append)
    assert lines[1] == "| log-prob kernels | not run | the time limit of the self-test was reached |"
    assert outcome.result == "not run"


def test_groups_and_names_choose_rows_in_the_order_of_the_table_without_a_common_limit():
    chosen = choose_rows(False, ["vLLM start", "decode", "oom", "resume"])
    names = [
        each.name for each in all_rows() if each.group in ("decode", "oom") or each.name in ("vLLM start", "resume")
    ]
    assert [each.name for each in chosen.rows] == names
    assert len(names) == 6
    assert chosen.limit == float("inf")
    with pytest.raises(ArgumentError, match=r"'decoding'.*decode.*GRPO learns"):
        choose_rows(False, ["decode", "decoding"])


def test_rows_beyond_the_time_of_the_self_test_run_by_name_and_quick_ones_within_three_minutes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    in_default_run, quick = choose_rows(True), choose_rows(True, quick=True)
    assert {each.name for each in all_rows()} - {each.name for each in in_default_run.rows} == {
        each.name for each in all_rows() if not each.in_default_run
    }
    assert (in_default_run.limit, in_default_run.quick, quick.limit, quick.quick) == (600, False, 180, True)
    assert {each.group for each in quick.rows} == {"kernels", "memory", "decode", "vllm", "oom"}
    assert {each.group for each in all_rows()} == {*GROUPS}


def test_the_page_about_gpus_lists_every_row_and_what_it_needs():
    listed = re.findall(
        r"^\| `(.+?)` \| (\w+) \| (.+?) \| (.+?) \| (.+?) \|$",
        (DOCS / "gpus.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    found = {name: (group, marks, needs) for name, group, marks, _, needs in listed}
    expected = {
        each.name: (each.group, ", ".join(_marks(each)) or "-", ", ".join(each.needs) or "-") for each in all_rows()
    }
    assert [*found] == [*expected]
    assert found == expected


def _marks(each):
    return [word for word, holds in (("quick", each.quick), ("by name", not each.in_default_run)) if holds]


def test_what_the_docs_say_was_not_run_on_a_gpu_has_a_row():
    names = {each.name for each in all_rows()}
    pages = [page for page in DOCS.rglob("*.md") if page.name != "arguments.md" and "log" not in page.parts[-2:]]
    texts = [text for page in pages for text in re.split(r"\n\n|\n\|", page.read_text(encoding="utf-8"))]
    not_run = [text for text in texts if re.search(r"not\s+run\s+on\s+(a\s+GPU|one)\b", text, re.IGNORECASE)]
    assert len(not_run) >= 4
    assert [text for text in not_run if not names & set(re.findall(r"`([^`]+)`", text))] == []
