"""Sizes in bytes as people write them: `8GiB`, `500MB`, a number."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: int | str) -> int | None:
    """The number of bytes, of 1024 to a KiB and 1000 to a KB; None for what is no size."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        return None
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()])
