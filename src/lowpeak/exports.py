"""Public names of packages that load their modules on first use (PEP 562)."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, for the names that the `__init__.pyi` beside `file` imports.

    Type checkers and editors read the same stub, so that each public name is listed once.
    """
    where = exported_names(Path(file).with_suffix(".pyi"))

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(where[name]), name)

    return load, lambda: sorted(where), sorted(where)


def exported_names(stub: Path) -> dict[str, str]:
    """Return each name that a stub imports, with the full path of the module that defines it."""
    body = ast.parse(stub.read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
