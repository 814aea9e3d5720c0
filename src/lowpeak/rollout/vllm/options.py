"""The names that the installed vLLM takes as engine arguments, read from its source: importing it takes many seconds.

`vllm.LLM` hands what it does not name itself to `EngineArgs`, whose fields are arguments (vLLM 0.31 to 0.33,
`engine/arg_utils.py`, `entrypoints/llm.py`); a server has those and its own (`entrypoints/**/cli_args.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lowpeak.errors import ArgumentError

_ENGINE = ("engine/arg_utils.py", "entrypoints/llm.py")
_SERVER = ("entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")


def check_options(given: Iterable[str], *, server: bool) -> None:
    """ArgumentError for a name that the installed vLLM does not take; what is not installed, or reads otherwise, is not asked."""
    known = known_options(server)
    for name in given:
        if known and name.replace("-", "_") not in known:
            near = get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(f"vllm_engine_kwargs has {name}, which vLLM does not take{meant}")


@cache
def known_options(server: bool) -> frozenset[str]:
    """All names; none where vLLM is not installed."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    folder = Path(found.origin).parent
    files = [folder / name for name in (*_ENGINE, *(_SERVER if server else ()))]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files if path.exists()]
    names = frozenset().union(*(_named(tree) for tree in trees))
    return names if "max_model_len" in names else frozenset()


def _named(tree: ast.AST) -> set[str]:
    return {name for node in ast.walk(tree) for name in _names_in(node)}


def _parameters_of(node: ast.ClassDef) -> Iterable[str]:
    made = next((each for each in node.body if getattr(each, "name", "") == "__init__"), None)
    if isinstance(made, ast.FunctionDef):
        yield from (argument.arg for argument in (*made.args.args[1:], *made.args.kwonlyargs))


def _names_in(node: ast.AST) -> Iterable[str]:
    """Fields of classes of arguments, parameters of `LLM`, and options that a parser is told."""
    if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
        yield from (each.target.id for each in node.body if _is_field(each))  # type: ignore[attr-defined]
    elif isinstance(node, ast.ClassDef) and node.name == "LLM":
        yield from _parameters_of(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
        yield node.value[2:].replace("-", "_")


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
