"""Tests hold names, values and numbers of messages, never their English, which may change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from architecture.sources import ROOT, tree_of

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
