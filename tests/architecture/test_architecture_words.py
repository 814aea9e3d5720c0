"""Words of the tests: no English of messages, which may change, and nouns for parameters and locals everywhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from architecture.sources import ROOT, tree_of

# Participles and adverbs that name nothing: whose, or of which thing?
EMPTY_NAMES = {"asked", "beside", "said", "told"}
ENGLISH = re.compile(r"\b[a-z]{2,} [a-z]{2,}\b")  # two neighbouring plain words


def english(tree: ast.AST) -> Iterator[str]:
    """The texts given as `match=` that hold English."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for text in (t for keyword in node.keywords if keyword.arg == "match" for t in ast.walk(keyword.value)):
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and ENGLISH.search(text.value):
                    yield f"{text.lineno}: {text.value}"


def test_no_pattern_of_an_error_holds_english():
    tests = ROOT / "tests"
    found = [
        f"{path.relative_to(tests)}:{text}"
        for path in sorted(tests.rglob("*.py"))
        if path.relative_to(tests).parts[0] != "architecture"
        for text in english(tree_of(path))
    ]
    assert found == []


def test_english_in_a_pattern_is_found():
    tree = ast.parse('raises(A, match=f"{x} must be a number")\nraises(A, match="beta.*sync_ref_model")')
    assert list(english(tree)) == ["1:  must be a number"]


def empty_names(tree: ast.AST) -> Iterator[str]:
    """The parameters, local variables and functions that have an empty name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if name.strip("_") in EMPTY_NAMES:
            yield f"{node.lineno}: {name}"


def test_parameters_and_locals_have_nouns():
    folders = ("src", "tests", "benchmarks", "examples")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 700
    assert [f"{path.relative_to(ROOT)}:{name}" for path in paths for name in empty_names(tree_of(path))] == []


def test_an_empty_name_is_found():
    tree = ast.parse(
        "def f(told):\n    said = told\n    for asked in said: print(asked)\n    return lambda beside: noun"
    )
    assert sorted(empty_names(tree)) == ["1: told", "2: said", "3: asked", "4: beside"]
