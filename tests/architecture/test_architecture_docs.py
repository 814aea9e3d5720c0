"""The manual names files that are there, its drawing and lists are those of the code, and its lines fit a diff."""

from __future__ import annotations

import re

import pytest

from architecture.call_paths import PAGE, listed, tables
from architecture.packages_drawing import DRAWING, drawing
from architecture.sources import PACKAGE, ROOT
from lowpeak.memory.phases import Phase

# The log and decisions tell what was; they keep the names of their time.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CURRENT = [page for page in PAGES if page.name != "log.md"]


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_each_file_that_a_page_names_is_there(page):
    named = re.findall(r"(?<![\w/.])((?:[\w]+/)+\w+\.py)\b", page.read_text(encoding="utf-8"))
    assert [
        name
        for name in named
        if not name.startswith("path/") and not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ] == []


@pytest.mark.parametrize("page", [*CURRENT, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_of_prose_end_at_100_columns(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    long = [
        line
        for line in text.splitlines()
        if len(line) > 100 and not line.startswith(("|", "    ")) and " " in line[:90]
    ]
    assert long == []


def test_the_code_of_the_pitfalls_stands_in_the_source():
    page = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    sources = [_stripped(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py*") if path.suffix != ".pyc"]
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 10
    assert [block for block in blocks if not any(_stripped(block) in source for source in sources)] == []


def _stripped(text):
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_each_phase_is_in_the_table_of_memory():
    table = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").partition("## Sizes")[0]
    assert set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"phase"} == {phase.value for phase in Phase}


def test_each_page_is_in_the_navigation():
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    named = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == pages


def test_the_drawing_is_of_the_imports_as_they_are():
    assert DRAWING.read_text(encoding="utf-8") == drawing(), "run python tests/architecture/packages_drawing.py"


@pytest.mark.extended
def test_the_listed_call_paths_are_those_of_a_run():
    assert listed(PAGE.read_text(encoding="utf-8")) == tables(), "run python tests/architecture/call_paths.py"
