"""The checksum is what its docstring says, in whatever parts, and finds what may happen to a tensor; buckets lose nothing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from fused_model import slices, weights
from lowpeak.errors import EngineError
from lowpeak.records import WeightSlice
from lowpeak.vllm.weight_sync.buckets import ChecksumTable, fill_buckets
from lowpeak.vllm.weight_sync.verification import (
    MIX_1,
    MIX_2,
    PLACE,
    ROW_BYTES,
    WIDTH,
    Checksum,
    read_checksums,
    tensor_checksum,
)

SIZES = [0, 1, 3, 4, 511, 4096, 4097, 9001]


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def _mix(number: int) -> int:
    number = _signed(number * MIX_1)
    number = _signed((number ^ (number >> 32)) * MIX_2)
    return number ^ (number >> 29)


def _naive(tensor: torch.Tensor) -> int:
    data = bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist())
    data += bytes(-len(data) % ROW_BYTES)
    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    rows = [sum(words[i : i + WIDTH]) for i in range(0, len(words), WIDTH)]
    columns = [sum(words[c::WIDTH]) for c in range(WIDTH)]
    return _signed(sum(_mix(total + (i + 1) * PLACE) for i, total in enumerate([*columns, *rows])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_the_checksum_is_the_formula(size, dtype):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    assert int(tensor_checksum(tensor)) == _naive(tensor)


@pytest.mark.parametrize("size", SIZES)
def test_parts_of_any_length_in_any_order_give_the_checksum_of_the_whole(size):
    chance = random.Random(size)
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16()
    cuts = sorted({0, size, *(chance.randint(0, size) for _ in range(7))})
    parts = list(pairwise(cuts))
    chance.shuffle(parts)
    total = Checksum(2 * size)
    for first, last in parts:
        total.add(2 * first, tensor[first:last])
    assert int(total.value()) == int(tensor_checksum(tensor))


@pytest.mark.parametrize("shape", [(300, 7), (70, 5000), (3, 4, 4000), (5, 300000)])
def test_a_strided_tensor_sums_as_its_copy_does(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    assert int(tensor_checksum(tensor)) == int(tensor_checksum(tensor.contiguous()))
    assert int(tensor_checksum(tensor, torch.bfloat16)) == int(tensor_checksum(tensor.contiguous().bfloat16()))


@pytest.mark.parametrize("shape", [(300, 1), (1, 1), (2, 1)])
def test_columns_of_a_tensor_sum_as_their_copies_do(shape):
    tensor = torch.randn(shape[0], 7)[:, 3:4]
    assert tensor.shape == shape
    assert int(tensor_checksum(tensor)) == int(tensor_checksum(tensor.clone(memory_format=torch.contiguous_format)))


def test_what_is_copied_on_the_way_is_summed_where_it_then_stands():
    values = torch.randn(30001).bfloat16()
    for offset in (0, 4, 3):  # words of 8 bytes begin at every fourth element
        place = torch.zeros(30010).bfloat16()[offset : offset + 30001]
        total = Checksum(2 * 30001)
        for first, last in ((5000, 30001), (0, 17), (17, 5000)):
            total.add(2 * first, place[first:last], values[first:last])
        assert torch.equal(place, values)
        assert int(total.value()) == int(tensor_checksum(values))


def _opposite_numbers(tensor):
    tensor[5, 2], tensor[40, 2] = -1.5, 1.5


MUTATIONS = {
    "one bit": lambda tensor: tensor.view(torch.int32)[17, 3].bitwise_xor_(1),
    "one sign": lambda tensor: tensor[17, 3].neg_(),
    "two rows": lambda tensor: tensor[3:20:16].copy_(tensor[3:20:16].flip(0)),
    # 64 rows of 16 floats are one and a half rows of the grid.
    "two far rows": lambda tensor: tensor[0:65:64].copy_(tensor[0:65:64].flip(0)),
    "neighbours": lambda tensor: tensor[5, 2:4].copy_(tensor[5, 2:4].flip(0)),
    "opposite numbers": _opposite_numbers,
    "shifted": lambda tensor: tensor.copy_(tensor.roll(1)),
    "end": lambda tensor: tensor[-1, -1].add_(1),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
@pytest.mark.parametrize("shape", [(128, 16), (100, 2048), (65, 33)])
def test_what_changed_changes_the_checksum(mutate, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensor[5, 2], tensor[40, 2] = 1.5, -1.5
    before = int(tensor_checksum(tensor))
    mutate(tensor)
    assert int(tensor_checksum(tensor)) != before


def test_zeros_at_the_end_count():
    assert int(tensor_checksum(torch.zeros(4096))) != int(tensor_checksum(torch.zeros(4097)))


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

    for bucket in fill_buckets(slices(tensors, count), buffer, sums, held_back):
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


def test_a_tensor_whose_slices_are_all_in_one_bucket_is_whole_in_it():
    (bucket,) = fill_buckets(slices(MANY, 64), lambda device: torch.empty(1 << 20, dtype=torch.uint8), None)
    assert [piece.name for piece in bucket.pieces] == list(MANY)
    assert all(piece.is_complete for piece in bucket.pieces)


@pytest.mark.parametrize("count", [1, 7, 64, 100000])
def test_the_sums_are_those_of_the_whole_tensors_sent_or_held_back(count):
    sums = ChecksumTable()
    found, _ = _filled(MANY, 200, count, sums, held_back={"b", "e"})
    assert sums.read() == read_checksums({name: tensor_checksum(tensor) for name, tensor in MANY.items()})
    assert torch.equal(found["a"], MANY["a"])
    assert found["b"].eq(-7).all()


def test_slices_that_end_before_their_tensor_are_an_error_with_its_name():
    sums = ChecksumTable()
    short = [WeightSlice("a.weight", (10,), torch.float32, 0, torch.ones(9))]
    list(fill_buckets(short, lambda device: torch.empty(64, dtype=torch.uint8), sums))
    with pytest.raises(EngineError, match=r"a\.weight"):
        sums.read()


def test_a_buffer_too_short_for_one_element_is_an_error():
    with pytest.raises(EngineError, match=r"q\.weight|embed"):
        _filled(weights(), 2, 10)
