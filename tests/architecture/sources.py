"""What the architecture tests read: the source files of lowpeak, as syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from lowpeak.exports import exported_names

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "lowpeak"

# From below: a package, or a module of lowpeak itself, imports only from layers below its own.
LAYERS = (
    ("errors", "exports", "records", "device_kind", "cgroups"),
    ("arguments", "batching", "cpu_cores", "data", "memory", "ranks"),
    ("algorithms", "logprobs", "optim", "watchdog"),
    ("heads",),
    ("attention", "models"),
    ("parallel", "rewards", "rollout"),
    ("checkpoint", "environments", "vllm"),
    ("journal",),
    ("report", "sizes"),
    ("training",),
    ("setup",),
    ("plan",),
    ("trainers",),
    ("selftest",),
    ("cli",),
    ("__main__",),
)

When = Literal["start", "call", "typing"]


@dataclass(frozen=True)
class Import:
    """`module` imports `target`: at start-up, only when a function is called, or only for type checkers."""

    module: str
    target: str
    when: When


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def modules() -> frozenset[str]:
    return frozenset(module_of(path) for path in files())


@cache
def exports() -> dict[str, str]:
    """The module that defines each public name of a package, by the name's full path: the packages' stubs say it."""
    found = {}
    for stub in PACKAGE.rglob("__init__.pyi"):
        package = module_of(stub)
        found |= {f"{package}.{name}": module for name, module in exported_names(stub.read_bytes()).items()}
    return found


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for path in files() for found in imports_in(module_of(path), tree_of(path), modules()))


def imports_in(module: str, tree: ast.AST, known: frozenset[str]) -> Iterator[Import]:
    """Every import in a tree. `from a import b` is an import of a.b where that is a module of lowpeak, or a name of
    another package; of the module that defines b where a is a package that exports it; else of a."""
    for node, when in _walk(tree, "start"):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, when)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                inside = node.module.split(".")[0] == "lowpeak"
                target = exports().get(full, node.module) if inside and full not in known else full
                yield Import(module, target, when)


def _walk(node: ast.AST, when: When) -> Iterator[tuple[ast.AST, When]]:
    for child in ast.iter_child_nodes(node):
        inner = when
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = "call"
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            inner = "typing"
        yield child, when
        yield from _walk(child, inner)


def is_under(name: str, prefix: str) -> bool:
    """Whether a dotted name is `prefix` or inside of it."""
    return name == prefix or name.startswith(f"{prefix}.")


def is_under_any(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(is_under(name, prefix) for prefix in prefixes)
