"""A rank that has fewer micro-batches than another, or no row that counts, with a KL in the loss: the step is one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
import uneven_ranks
from fault_ranks import seen
from forked import succeed


def test_steps_of_uneven_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    succeed(uneven_ranks.train_all, tmp_path / "one", world_size=1)
    succeed(uneven_ranks.train_all, tmp_path / "two")
    (alone,) = seen(tmp_path / "one", 1)
    for rank in seen(tmp_path / "two"):
        for case, expected in alone.items():
            assert rank[case]["losses"] == pytest.approx(expected["losses"], abs=1e-5), case
            assert rank[case]["kls"] == pytest.approx(expected["kls"], abs=1e-5), case
            for name, values in expected["weights"].items():
                assert rank[case]["weights"][name] == pytest.approx(values, abs=5e-6), (case, name)
    assert all(kl > 0 for found in alone.values() for kl in found["kls"][1:])


def test_ranks_with_other_data_or_another_folder_do_not_begin(tmp_path: Path) -> None:
    succeed(uneven_ranks.hold_other_data, tmp_path)
    for found in seen(tmp_path):
        assert found["rows"].startswith(
            "DataError: train_dataset has 24 rows on rank 0 and 23 rows on rank 1: give all"
        )
        assert found["folder"].startswith(
            f"ArgumentError: output_dir is '{tmp_path}/run' on rank 0 and '{tmp_path}/other'"
        )
