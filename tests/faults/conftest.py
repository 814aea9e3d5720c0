"""The run that nobody disturbs, which others are compared with."""

from __future__ import annotations

from typing import Any

import pytest
from fault_runs import Case, ending, run_alone

from child_processes import succeed


@pytest.fixture(scope="session")
def left_alone(tmp_path_factory):
    """What a case's run comes to when nobody disturbs it; run once per case."""
    known: dict[int, tuple[Any, ...]] = {}

    def outcome(case: Case) -> tuple[Any, ...]:
        if id(case) not in known:
            place = tmp_path_factory.mktemp("alone")
            succeed(run_alone, case, place)
            known[id(case)] = ending(place)
        return known[id(case)]

    return outcome
