"""Names and sizes: short files, short functions, one word per thing."""

from __future__ import annotations

import ast
import re

import pytest

from architecture.sources import ROOT, files, module_of, tree_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_COMPLEXITY = 10
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.match_case)
MAX_PROTOCOL_MEMBERS = 7
DRAWERS = {"utils", "util", "common", "helpers", "misc"}
# Names that say nothing of the thing: bare participles, pronouns, adverbs.
EMPTY_WORDS = set(
    [
        "alike",
        "apart",
        "asked",
        "at_once",
        "beside",
        "counted",
        "gathered",
        "given",
        "held",
        "here",
        "judged",
        "matched",
        "misfit",
        "others",
        "outgoing",
        "own",
        "part",
        "parts",
        "pretended",
        "resting",
        "said",
        "settle",
        "taken",
        "tell",
        "there",
        "told",
        "waiting",
        "what",
        "whole",
    ]
)
OTHER_WORDS = re.compile(r"(^|_)(logps?|log_probs?)(_|$)")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~>])/(home|root|tmp|Users|mnt)/")


def test_no_module_is_a_drawer():
    assert [module for module in map(module_of, files()) if DRAWERS & set(module.split("."))] == []


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_files_are_short_enough_to_read(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


def test_functions_are_short_enough_to_see_whole():
    long = [
        f"{module_of(path)}.{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def _functions():
    for path in files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module_of(path)}.{node.name}", node


def _complexity(function):
    """1, and one for each branch, loop, handler, comprehension and further operand of `and` and `or`, nested functions too."""
    nodes = list(ast.walk(function))
    return (
        1
        + sum(isinstance(n, BRANCHES) for n in nodes)
        + sum(len(n.values) - 1 for n in nodes if isinstance(n, ast.BoolOp))
    )


def test_functions_branch_seldom_enough_to_follow():
    assert [name for name, node in _functions() if _complexity(node) > MAX_COMPLEXITY] == []


def test_protocols_have_at_most_seven_members_of_their_own():
    sizes = {
        f"{module_of(path)}.{node.name}": sum(isinstance(line, ast.FunctionDef | ast.AnnAssign) for line in node.body)
        for path in files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases)
    }
    assert "lowpeak.rollout.engine.RolloutEngine" in sizes
    assert {name: size for name, size in sizes.items() if size > MAX_PROTOCOL_MEMBERS} == {}


def test_every_file_opens_with_what_it_is():
    silent = [module_of(path) for path in files() if tree_of(path).body and ast.get_docstring(tree_of(path)) is None]
    assert silent == []


def test_a_log_probability_is_called_a_logprob():
    made = {(module_of(path), name) for path in files() for name in _names_made(tree_of(path))}
    named = {(module, name) for module, name in made if name != "precompute_ref_log_probs"}  # TRL's argument
    assert sorted(f"{module}: {name}" for module, name in named if OTHER_WORDS.search(name)) == []


def test_public_names_say_what_a_thing_is():
    public = [
        f"{module_of(path)}.{node.name}"
        for path in files()
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    assert [name for name in public if {*name.lower().rsplit(".", 2)[1:]} & EMPTY_WORDS] == []


def _names_made(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _texts():
    written = [*files(), *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*"), ROOT / "Makefile"]
    return [path for path in written if path.is_file()]


@pytest.mark.parametrize("pattern", [UNFINISHED, ABSOLUTE_PATH], ids=["unfinished work", "somebody's own folders"])
def test_the_source_and_the_docs_name_no(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
