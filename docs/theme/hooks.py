"""What the site adds to the pages: ranks in the search, links to the source, the columns' names in the cells of tables."""

from __future__ import annotations

import ast
import fnmatch
import html
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# By the navigation's first level. The search leaves the log and the decisions out.
RANKS = {"How-to guides": 4, "Get started": 1, "Reference": 1}
SOUGHT = {"index.md": 4, "memory.md": 4}  # pages that answer what users search for, wherever they stand
LEFT_OUT = ("log.md", "log/", "decisions/")


def on_config(config: Any) -> Any:
    """Link each page to its source, if the repository has an address."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rank user pages before those for contributors, and name the modules of the public API's objects."""
    if page.file.src_uri == "api.md":
        markdown = _with_modules(markdown)
    top = page.ancestors[-1].title if page.ancestors else page.title
    page.meta["search"] = {
        "boost": SOUGHT.get(page.file.src_uri, RANKS.get(top, 0.2)),
        "exclude": page.file.src_uri.startswith(LEFT_OUT),
    }
    return markdown


def _with_modules(markdown: str) -> str:
    """Write `::: NAME ...` and its options as one block for each public name; a name that the page lacks is an error."""
    stub = ast.parse((ROOT / "src" / "lowpeak" / "__init__.pyi").read_text(encoding="utf-8"))
    exports = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    left = dict(exports)

    def blocks(block: re.Match[str]) -> str:
        names = [name for pattern in block[1].split() for name in fnmatch.filter([*left], pattern)]
        return "\n\n".join(f"::: {left.pop(name)}.{name}{block[2]}" for name in names)

    markdown = re.sub(r"^::: (.+)((?:\n    .+)*)$", blocks, markdown, flags=re.MULTILINE)
    if left:
        raise ValueError(f"docs/api.md lacks {', '.join(left)}")
    return markdown


def on_page_content(content: str, config: Any, **_: Any) -> str:
    """Give each cell the name of its column, which narrow screens show in front of it, and link files to the repository."""
    content = re.sub(r"<table>.*?</table>", _named_cells, content, flags=re.DOTALL)
    if not config.repo_url:
        return content
    return re.sub(r"<code>([\w/.-]+\.(?:py|yaml|ipynb))</code>", lambda code: _linked(code, config.repo_url), content)


def _linked(code: re.Match[str], repository: str) -> str:
    places = (path for path in (f"src/lowpeak/{code[1]}", code[1]) if (ROOT / path).is_file())
    path = next(places, None)
    return f'<a href="{repository.rstrip("/")}/blob/main/{path}">{code[0]}</a>' if path else code[0]


def on_post_page(output: str, **_: Any) -> str:
    """Let names in tables break after `_`, `/`, `.`, `=` and `,`; the search has them whole."""
    return re.sub(r"<td[^>]*>.*?</td>", _with_breaks, on_post_template(output), flags=re.DOTALL)


def on_post_template(output: str, **_: Any) -> str:
    """Name the search's dialog, also on the page of missing addresses."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


def _with_breaks(cell: re.Match[str]) -> str:
    return re.sub(
        r"(<code>)(.*?)(?=</code>)", lambda code: code[1] + re.sub(r"([_/.=,])(?=\w)", r"\1<wbr>", code[2]), cell[0]
    )


def _named_cells(table: re.Match[str]) -> str:
    head, end, body = table[0].partition("</thead>")
    names = [_plain(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", head, re.DOTALL)]
    rows = re.split(r"(?=<tr>)", body)
    head = re.sub(r"<th[^>]*></th>", "<td></td>", head)  # a heading without text is none
    return head + end + "".join(_named_row(row, names) for row in rows)


def _named_row(row: str, names: list[str]) -> str:
    column = iter(names)

    def name(cell: re.Match[str]) -> str:
        title = next(column, "")
        return f'<td data-column="{html.escape(title)}"{cell[1]}>' if title else cell[0]

    return re.sub(r"<td([^>]*)>", name, row)


def _plain(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()
