"""The checksum is what its docstring says, in whatever parts it is taken, and finds what may happen to a tensor."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from lowpeak.rollout.vllm.weights.checksum import MIX_1, MIX_2, PLACE, ROW_BYTES, WIDTH, Checksum, checksum

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
    assert int(checksum(tensor)) == _naive(tensor)


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
    assert int(total.value()) == int(checksum(tensor))


@pytest.mark.parametrize("shape", [(300, 7), (70, 5000), (3, 4, 4000), (5, 300000)])
def test_a_strided_tensor_sums_as_its_copy_does(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    assert int(checksum(tensor)) == int(checksum(tensor.contiguous()))
    assert int(checksum(tensor, torch.bfloat16)) == int(checksum(tensor.contiguous().bfloat16()))


@pytest.mark.parametrize("shape", [(300, 1), (1, 1), (2, 1)])
def test_columns_of_a_tensor_sum_as_their_copies_do(shape):
    tensor = torch.randn(shape[0], 7)[:, 3:4]
    assert tensor.shape == shape
    assert int(checksum(tensor)) == int(checksum(tensor.clone(memory_format=torch.contiguous_format)))


def test_what_is_copied_on_the_way_is_summed_where_it_then_stands():
    values = torch.randn(9001).bfloat16()
    for offset in (0, 4, 3):  # words of 8 bytes begin at every fourth element
        place = torch.zeros(9010).bfloat16()[offset : offset + 9001]
        total = Checksum(2 * 9001)
        for first, last in ((5000, 9001), (0, 17), (17, 5000)):
            total.add(2 * first, place[first:last], values[first:last])
        assert torch.equal(place, values)
        assert int(total.value()) == int(checksum(values))


def _one_bit(tensor):
    tensor.view(torch.int32)[17, 3] ^= 1


def _one_sign(tensor):
    tensor[17, 3].neg_()


def _two_rows(tensor):
    tensor[[3, 19]] = tensor[[19, 3]]


def _two_far_rows(tensor):
    tensor[[0, 64]] = tensor[[64, 0]]  # 64 rows of 16 floats are one and a half rows of the grid


def _neighbours(tensor):
    tensor[5, [2, 3]] = tensor[5, [3, 2]]


def _opposite_numbers(tensor):
    tensor[5, 2], tensor[40, 2] = -1.5, 1.5


def _shifted(tensor):
    tensor.copy_(tensor.roll(1))


def _end(tensor):
    tensor[-1, -1] += 1


MUTATIONS = [_one_bit, _one_sign, _two_rows, _two_far_rows, _neighbours, _opposite_numbers, _shifted, _end]


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("shape", [(128, 16), (100, 2048), (65, 33)])
def test_what_changed_changes_the_checksum(mutate, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensor[5, 2], tensor[40, 2] = 1.5, -1.5
    before = int(checksum(tensor))
    mutate(tensor)
    assert int(checksum(tensor)) != before


def test_zeros_at_the_end_count():
    assert int(checksum(torch.zeros(4096))) != int(checksum(torch.zeros(4097)))
