"""safetensors files written range by range are what the library reads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from lowpeak.checkpoint.tensor_file import TensorFiles
from safetensors import safe_open
from safetensors.torch import load_file

from lowpeak.checkpoint.atomic import staged_files
from lowpeak.ranks import Ranks

TENSORS = {
    "half": torch.randn(5, 3).bfloat16(),
    "scalar": torch.tensor(2.5),
    "wide": torch.randn(7, 11),
    "ids": torch.arange(6).view(2, 3),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
}


def layout_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], max_bytes: int, count: int = 4) -> None:
    """Every tensor in ranges of `count` values, all of them in a random order."""
    pieces = [
        (name, first, tensor.reshape(-1)[first : first + count])
        for name, tensor in tensors.items()
        for first in range(0, tensor.numel(), count)
    ]
    random.Random(0).shuffle(pieces)
    with TensorFiles(folder, layout_of(tensors), max_bytes) as files:
        for piece in pieces:
            files.write(*piece)


def test_ranges_in_any_order_are_the_tensors(tmp_path):
    write(tmp_path, TENSORS, 1 << 30)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_that_need_several_files_have_an_index(tmp_path):
    write(tmp_path, TENSORS, 320)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-0000{number}-of-0000{len(files)}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


@pytest.mark.parametrize(("first", "second"), [(320, 1 << 30), (1 << 30, 320)])
def test_what_an_earlier_save_left_is_not_read_again(tmp_path, first, second):
    for max_bytes in (first, second):
        with staged_files(tmp_path, Ranks()) as stage:
            write(stage, TENSORS, max_bytes)
    several = second == 320
    assert (tmp_path / "model.safetensors").exists() != several
    assert (tmp_path / "model.safetensors.index.json").exists() == several
    assert (len(list(tmp_path.glob("model-*"))) > 1) == several
