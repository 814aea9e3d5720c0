"""A file's ranks are launched once for all of its tests, which the first of them waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT_S = 900  # of the launches of a whole file, on two cores that others use too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))
