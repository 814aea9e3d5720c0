"""How much of a sharded model may be gathered while it generates: TRL's switch, its older name, and bytes in their place."""

from __future__ import annotations

from typing import Any

from lowpeak.config.rejected import TRL_DEFAULTS
from lowpeak.config.sizes import parse_bytes
from lowpeak.errors import ArgumentError

ALL = 1 << 62  # bytes that hold any model
_NAMES = ("gather_budget", "ds3_gather_for_generation", "disable_unwrapping_for_generation")


def resolve_gather_budget(args: Any) -> int | None:
    """Bytes, `ALL`, or None: from free memory. ArgumentError where two of the three names contradict each other."""
    said = {name: getattr(args, name, None) for name in _NAMES}
    budgets = {
        "gather_budget": _bytes(said["gather_budget"]),
        "ds3_gather_for_generation": {None: None, True: ALL, False: 0}[said["ds3_gather_for_generation"]],
        "disable_unwrapping_for_generation": {None: None, True: 0, False: ALL}[
            said["disable_unwrapping_for_generation"]
        ],
    }
    given = {name: budget for name, budget in budgets.items() if said[name] is not None}
    if len(set(given.values())) > 1:
        told = " and ".join(f"{name}={said[name]!r}" for name in given)
        raise ArgumentError(f"{told} contradict each other: keep gather_budget, and remove the others.")
    return next(iter(given.values()), None)


def given_gathering(args: Any) -> str | None:
    """The first of the names that was set to other than TRL's default, if any."""
    return next((name for name in _NAMES if getattr(args, name, None) not in (None, TRL_DEFAULTS.get(name))), None)


def _bytes(text: int | str | None) -> int | None:
    """`8GiB`, `500MB`, `0` or a number as bytes; None for `auto`."""
    if text is None or text == "auto":
        return None
    size = parse_bytes(text)
    if size is None:
        raise ArgumentError(
            f"gather_budget={text!r} must be 'auto', a number of bytes, or a size such as '8GiB' or '500MB'."
        )
    return size
