"""Models that do not train under DDP and ZeRO-1/2: a host holds one copy of a checkpoint, not one for each of its ranks."""

from __future__ import annotations

from pathlib import Path

import loading_ranks
import pytest
import torch
from fault_ranks import seen
from forked import succeed
from setups import named_models

from tiny import tiny_model

MODEL_MB = 94.0  # in fp32; half of it in the file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("model")
    model = tiny_model(2048, hidden=512, layers=10, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) * 4 == pytest.approx(MODEL_MB * 2**20, rel=0.1)
    model.save_pretrained(place)
    return str(place)


def test_one_rank_reads_frozen_models_for_devices_and_the_others_have_no_copy_in_host_memory(
    tmp_path: Path, folder: str
) -> None:
    _, judge = named_models(tmp_path / "named")
    succeed(loading_ranks.hand_out, tmp_path, folder, judge)
    first, second = seen(tmp_path)
    for name in ("replica", "parts", "judge"):
        assert first[name]["read"]
        assert not second[name]["read"]
    for name in ("replica", "parts"):
        assert first[name]["same"]
        assert second[name]["same"]
        assert first[name]["loading"] > 0.9 * MODEL_MB  # cast from the file's dtype, so it is rank 0's own
        assert second[name]["loading"] < 0.1 * MODEL_MB
    assert second["replica"]["preparing"] < 1.2 * MODEL_MB
    assert second["parts"]["preparing"] < 0.8 * MODEL_MB  # its half, and a layer on the way


def test_ranks_on_cpus_share_the_pages_of_the_file(tmp_path: Path, folder: str) -> None:
    succeed(loading_ranks.share_the_file, tmp_path, folder)
    for found in seen(tmp_path):
        assert found["same"]
        assert found["own"] < 0.05 * MODEL_MB
