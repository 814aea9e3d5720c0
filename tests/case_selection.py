"""Which cases of a test `make test` runs, and which of them a module's fixture has to make."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def mark_extended(cases: Sequence[Any], core: Collection[Any], mark: str = "extended") -> list[Any]:
    """Return cases for `parametrize`; all but those of `core` are marked `extended`, or as `mark` says."""
    assert all(case in cases for case in core)
    marks = getattr(pytest.mark, mark)
    return [
        case if case in core else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
        for case in cases
    ]


def selected_cases(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return the values that these parameters have in the selected tests of the fixture's module, each once."""
    params = [item.callspec.params for item in _selected(request) if hasattr(item, "callspec")]
    found = [tuple(each[name] for name in names) for each in params if each.keys() >= set(names)]
    return list(dict.fromkeys(found if len(names) > 1 else [value for (value,) in found]))


def is_selected(request: pytest.FixtureRequest, *tests: str) -> bool:
    """Return whether one of these tests of the fixture's module was selected."""
    return any(item.originalname in tests for item in _selected(request))


def _selected(request: pytest.FixtureRequest) -> list[Any]:
    return [item for item in request.session.items if getattr(item, "module", None) is request.module]
