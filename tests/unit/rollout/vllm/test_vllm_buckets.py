"""Slices become buckets that are never longer than they may be, and nothing of them is lost."""

from __future__ import annotations

import pytest
import torch

from fused import slices, weights
from lowpeak.errors import EngineError
from lowpeak.records import WeightSlice
from lowpeak.rollout.vllm.weights.buckets import Piece, Sums, fill, read_sums
from lowpeak.rollout.vllm.weights.checksum import checksum

MANY = {
    "a": torch.randn(1000),
    "b": torch.randn(7, 11).bfloat16(),
    "c": torch.randn(3),
    "d": torch.randn(4, 500).half(),
    "e": torch.randn(()),
}


def _filled(tensors, num_bytes, count, sums=None, held_back=()):
    """The tensors put together again, and how long every bucket was."""
    parts = {name: torch.full((tensor.numel(),), -7.0).to(tensor.dtype) for name, tensor in tensors.items()}
    lengths = []
    made = []

    def buffer(device):
        made.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return made[-1]

    for bucket in fill(slices(tensors, count), buffer, sums, held_back):
        lengths.append(len(bucket.data))
        for piece in bucket.pieces:
            parts[piece.name][piece.start : piece.start + piece.count] = piece.values_in(bucket.data)
    assert len(made) <= 1
    return {name: part.view(tensors[name].shape) for name, part in parts.items()}, lengths


@pytest.mark.parametrize("num_bytes", [64, 200, 1024, 1 << 20])
@pytest.mark.parametrize("count", [1, 7, 64, 100000])
def test_buckets_hold_everything_and_are_never_longer_than_their_buffer(num_bytes, count):
    found, lengths = _filled(MANY, num_bytes, count)
    assert max(lengths) <= num_bytes
    assert all(torch.equal(found[name], tensor) for name, tensor in MANY.items())


def test_one_buffer_serves_all_buckets_and_small_tensors_share_one():
    _, lengths = _filled(MANY, 1 << 20, 64)
    assert len(lengths) == 1


def test_a_tensor_whose_slices_are_all_in_one_bucket_is_whole_in_it():
    (bucket,) = fill(slices(MANY, 64), lambda device: torch.empty(1 << 20, dtype=torch.uint8), None)
    assert [piece.name for piece in bucket.pieces] == list(MANY)
    assert all(piece.is_whole for piece in bucket.pieces)


@pytest.mark.parametrize("count", [1, 7, 64, 100000])
def test_the_sums_are_those_of_the_whole_tensors_sent_or_held_back(count):
    sums = Sums()
    found, _ = _filled(MANY, 200, count, sums, held_back={"b", "e"})
    assert sums.read() == read_sums({name: checksum(tensor) for name, tensor in MANY.items()})
    assert torch.equal(found["a"], MANY["a"])
    assert found["b"].eq(-7).all()


def test_slices_that_end_before_their_tensor_are_an_error_with_its_name():
    sums = Sums()
    short = [WeightSlice("a.weight", (10,), torch.float32, 0, torch.ones(9))]
    list(fill(short, lambda device: torch.empty(64, dtype=torch.uint8), sums))
    with pytest.raises(EngineError, match=r"a\.weight"):
        sums.read()


def test_a_piece_survives_json():
    piece = Piece("a", (2, 3), torch.bfloat16, 1, 4, 64)
    assert Piece.from_json(piece.to_json()) == piece


def test_a_buffer_too_short_for_one_element_is_an_error():
    with pytest.raises(EngineError, match=r"q\.weight|embed"):
        _filled(weights(), 2, 10)
