"""The run that nobody disturbs, which others are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fault_runs import Case, ending, run_alone

from children import succeed


@pytest.fixture(scope="session")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Any, ...]]:
    """What a case's run comes to when nobody disturbs it; run once per case."""
    known: list[tuple[Case, tuple[Any, ...]]] = []

    def outcome(case: Case) -> tuple[Any, ...]:
        for other, found in known:
            if other is case:
                return found
        place = tmp_path_factory.mktemp("alone")
        succeed(run_alone, case, place)
        known.append((case, ending(place)))
        return known[-1][1]

    return outcome
