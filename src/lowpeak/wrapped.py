"""What an adapter's wrapper is around."""

from __future__ import annotations

from typing import Any


def transformers_model(model: Any) -> Any:
    """The model that has `generate`, a named signature and a head: the one inside an adapter's wrapper, where there is one."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model
