"""Lazy packages: public names, listed in a stub, whose modules are imported on first use (PEP 562)."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose code is in `file`.

    The public names are those that the `__init__.pyi` in the same folder imports. Type checkers and editors read the same
    stub, so each name is listed once.
    """
    module_of = exported_names(Path(file).with_suffix(".pyi"))

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return load, lambda: sorted(module_of), sorted(module_of)


def exported_names(stub: Path) -> dict[str, str]:
    """Return the defining module of each name that a stub imports."""
    body = ast.parse(stub.read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
