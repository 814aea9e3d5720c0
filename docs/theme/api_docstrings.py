"""Docstrings as Markdown: aligned rows of names and meanings become lists, examples become code."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

_ROW = re.compile(r"^(\w[\w, ()*.\[\]|]*?) {2,}(\S.*)$")


class MarkdownDocstrings(griffe.Extension):
    """Rewrites the docstring of each object that the API reference shows."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite an object's docstring, if it has one."""
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return the docstring with its examples fenced, and with `name   meaning` as items of lists."""
    parts = [
        "\n".join(_with_items(part.splitlines())) if not _is_code(part) else _fenced(part)
        for part in text.split("\n\n")
    ]
    return "\n\n".join(parts).replace("\n```\n\n```python", "\n")


def _is_code(part: str) -> bool:
    try:
        statements = ast.parse(part).body
    except SyntaxError:
        return False
    return not all(isinstance(each, ast.Expr) and not isinstance(each.value, ast.Call) for each in statements)


def _fenced(part: str) -> str:
    return f"```python\n{part}\n```"


def _with_items(lines: list[str]) -> list[str]:
    written: list[str] = []
    in_list = False
    for line in lines:
        row = _ROW.match(line)
        if row:
            written += [*([] if in_list else [""]), f"- `{row[1]}`: {row[2]}"]
        elif in_list and line.startswith("  ") and line.strip():
            written.append(f"    {line.strip()}")
        else:
            written.append(line)
        in_list = row is not None or (in_list and line.startswith("  "))
    return written
