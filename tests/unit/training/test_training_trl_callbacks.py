"""TRL's callbacks run in lowpeak's trainers as they are: generation, reference, averages, tables, merges, bars."""

from __future__ import annotations

import pytest

from child_processes import call
from trl_wheel import needs_trl


def run(name, place):
    from trl_callbacks import CHECKS

    CHECKS[name](place)


@needs_trl
@pytest.mark.parametrize("name", ["log_completions", "sync_reference", "bema", "weave", "merge", "rich_progress"])
def test_a_callback_of_trl_runs(name, tmp_path):
    assert call(run, name, tmp_path) == 0, (tmp_path / "log").read_text()[-2000:]
