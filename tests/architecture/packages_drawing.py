"""Draw the packages and who imports whom: `python tests/architecture/packages_drawing.py` writes docs/packages.svg."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from architecture.sources import LAYERS, ROOT, all_imports

DRAWING = ROOT / "docs" / "packages.svg"
# From what users call, above, to what everything uses, below. The last row's arrows are left out: all packages import it.
ROWS = (*reversed(LAYERS[2:-1]), (*LAYERS[1], *LAYERS[0]))
WIDTH, ROW_HEIGHT, BOX = 1320, 72, (118, 34)


def imports_between_packages() -> Counter[tuple[str, str]]:
    """Return how often a module of one package imports from another."""
    pairs = Counter[tuple[str, str]]()
    for found in all_imports():
        user, used = (name.split(".")[1:2] for name in (found.module, found.target))
        if found.target.startswith("lowpeak.") and user and used and user != used:
            pairs[user[0], used[0]] += 1
    return pairs


def direct(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows that do not follow from others: a package that is reached through another one has none of its own."""
    level = {name: row for row, names in enumerate(ROWS) for name in names}
    down = {(a, b) for a, b in pairs if level[a] < level[b]}
    reached: dict[str, set[str]] = {}
    for name in sorted(level, key=level.__getitem__, reverse=True):
        below = {b for a, b in down if a == name}
        reached[name] = below.union(*(reached[b] for b in below))
    implied = {(a, c) for a, b in down for c in reached[b]}
    return (down - implied) | (pairs - down)


def drawing() -> str:
    """Return the picture as SVG."""
    pairs = {pair for pair in imports_between_packages() if pair[0] != "__main__"}
    unknown = {name for pair in pairs for name in pair} - {name for row in ROWS for name in row}
    assert not unknown, f"give {sorted(unknown)} a place in ROWS"
    places = {
        name: (WIDTH * (2 * column + 1) // (2 * len(names)), 40 + row * ROW_HEIGHT)
        for row, names in enumerate(ROWS)
        for column, name in enumerate(names)
    }
    arrows = sorted(direct({pair for pair in pairs if pair[1] not in ROWS[-1]}))
    lines = [_arrow(places[a], places[b]) for a, b in arrows]
    boxes = [_box(name, *place) for name, place in places.items()]
    height = len(ROWS) * ROW_HEIGHT + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">',
        "<title>Packages of lowpeak; an arrow points to the package that is imported</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#667"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    )
    return "\n".join([*head, *lines, *boxes, "</svg>", ""])


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    half = BOX[1] // 2
    style = 'fill="none" stroke="#667" stroke-width="1.2" marker-end="url(#head)"'
    if start[1] == end[1]:
        bend = start[1] - half - 26
        return f'<path d="M{start[0]},{start[1] - half} Q{(start[0] + end[0]) // 2},{bend} {end[0]},{end[1] - half}" {style}/>'
    sign = 1 if end[1] > start[1] else -1
    return f'<path d="M{start[0]},{start[1] + sign * half} L{end[0]},{end[1] - sign * half}" {style}/>'


def _box(name: str, x: int, y: int) -> str:
    width, height = BOX
    corner = f'x="{x - width // 2}" y="{y - height // 2}"'
    box = f'<rect {corner} width="{width}" height="{height}" rx="5" fill="#eef3fb" stroke="#446"/>'
    return f'{box}<text x="{x}" y="{y + 5}" text-anchor="middle">{name}</text>'


if __name__ == "__main__":
    DRAWING.write_text(drawing(), encoding="utf-8")
