"""Metrics of a user's own are of the whole evaluation on every rank, also where ranks have another number of rows."""

from __future__ import annotations

from pathlib import Path

import metric_ranks
import numpy as np
import pytest
from fault_ranks import seen
from forked import succeed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_rank_has_the_predictions_of_one_process(tmp_path: Path, strategy: str) -> None:
    succeed(metric_ranks.evaluate, tmp_path / "one", "ddp", world_size=1)
    succeed(metric_ranks.evaluate, tmp_path / "two", strategy)
    (alone,) = seen(tmp_path / "one", 1)
    assert (alone["SFT rows"], alone["Reward rows"]) == (5, 4)  # a pair of equal rows is left out
    for rank in seen(tmp_path / "two"):
        for kind in ("SFT", "Reward"):
            for ours, expected in zip(rank[kind], alone[kind], strict=True):
                np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
