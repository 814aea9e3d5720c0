"""The manual names files that are there, its drawing and lists are those of the code, and its lines fit a diff."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

import lowpeak
from architecture.call_paths import PAGE, listed, tables
from architecture.packages_drawing import DRAWING, drawing
from architecture.sources import PACKAGE, ROOT
from lowpeak.memory.phases import Phase

# The pages in docs/log and docs/decisions tell what was; they keep the names of their time.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_file_that_a_page_names_is_there(page):
    named = re.findall(r"(?<![\w/.])((?:[\w]+/)+\w+\.py)\b", page.read_text(encoding="utf-8"))
    assert [
        name
        for name in named
        if not name.startswith("path/") and not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_target_and_benchmark_that_a_page_names_is_there(page):
    text, makefile = page.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make\s([a-z][\w-]+)", text, re.MULTILINE))
    assert targets <= set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    modules = re.findall(r"python -m\s(benchmarks\.[a-z]\w*)", text)
    assert [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_of_prose_end_at_100_columns(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    long = [
        line
        for line in text.splitlines()
        if len(line) > 100 and not line.startswith(("|", "    ")) and " " in line[:90]
    ]
    assert long == []


def test_the_changelogs_releases_are_short_and_the_newest_is_this_version():
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    assert titles[0] == "Unreleased"
    assert [title for title in titles[1:] if not re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", title)] == []
    assert [section for section in sections[1:] if len(section.strip().splitlines()) > 60] == []
    version, date = titles[1].rstrip(")").split(" (")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert lowpeak.__version__ == project["version"] == citation["version"] == version
    assert str(citation["date-released"]) == date


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
