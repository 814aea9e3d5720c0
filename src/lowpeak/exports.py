"""Lazy packages: public names, listed in a stub, whose modules are imported on first use (PEP 562)."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose code is in `file`.

    The public names are those that the `__init__.pyi` in the same folder, or zip file, imports. Type checkers and editors read
    the same stub, so each name is listed once.
    """
    module = sys.modules[package]
    # The loader also reads from a zip file.
    stub = module.__loader__.get_data(str(Path(file).with_suffix(".pyi")))  # type: ignore[union-attr]
    module_of = exported_names(stub)

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return load, lambda: sorted([*module_of, *(vars(module).keys() & {"__version__"})]), sorted(module_of)


def exported_names(stub: bytes) -> dict[str, str]:
    """Return the defining module of each name that the text of a stub imports."""
    body = ast.parse(stub).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
