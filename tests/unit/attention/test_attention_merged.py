"""Attention over a forest on the CPU: values and gradients are the definition's."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from attending import HEADS, SCALE, dense, heads, values_and_gradients
from forests import forest_of, length_of
from lowpeak.attention.definition import forest_mask
from lowpeak.attention.install import attend_forest
from lowpeak.attention.layout import ForestLayout
from lowpeak.attention.merged import merged_attention

FORESTS = {
    "one plain sequence": forest_of((0, (9,))),
    "plain sequences": forest_of((0, (4,)), (0, (1,)), (0, (7,))),
    "one prompt": forest_of((5, (3, 1, 4))),
    "a prompt with one completion": forest_of((1, (1,))),
    "mixed, with padding": forest_of((5, (3, 1, 4)), (0, (6,)), (2, (4, 3)), padding=5),
    "longer than the kernel's blocks": forest_of((70, (600, 33)), (530, (2, 40)), padding=3),
}


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("name", FORESTS)
def test_values_and_gradients_are_the_definitions_to_the_last_digits(name, shape):
    forest = FORESTS[name]
    tensors = heads(forest, *HEADS[shape], torch.float64)
    found = values_and_gradients(lambda q, k, v: merged_attention(q, k, v, forest.trees, SCALE), tensors)
    expected = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_worse_than_a_dense_masks(dtype):
    forest = FORESTS["longer than the kernel's blocks"]
    tensors = heads(forest, 6, 2, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    meant = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), exact)
    found = values_and_gradients(lambda q, k, v: merged_attention(q, k, v, forest.trees, SCALE), tensors)
    plain = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), tensors)
    for a, b, c in zip(found, plain, meant, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


def test_the_mask_says_who_sees_whom():
    rows = ["100000", "110000", "111000", "110100", "110110", "000000"]
    assert ["".join(str(int(x)) for x in row) for row in forest_mask(forest_of((2, (1, 2)), padding=1), 6)] == rows


def test_padding_gets_zeros_and_gives_no_gradient():
    forest = forest_of((3, (2, 2)), padding=4)
    query, key, value = heads(forest, 4, 2, torch.float32)
    out = merged_attention(query, key, value, forest.trees, SCALE)
    out.sum().backward()
    assert not out[:, 7:].any()
    assert not any(x.grad[:, :, 7:].any() for x in (query, key, value))


def test_what_another_completion_says_changes_no_bit():
    forest = forest_of((4, (3, 3)), (0, (5,)))
    query, key, value = heads(forest, 4, 2, torch.float32)
    before = merged_attention(query, key, value, forest.trees, SCALE)
    with torch.no_grad():
        for tensor in (query, key, value):
            tensor[:, :, 7:10] += 1
    after = merged_attention(query, key, value, forest.trees, SCALE)
    others = [*range(7), *range(10, 15)]
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, 7:10], after[:, 7:10])


def test_values_may_be_narrower_than_queries():
    forest = FORESTS["mixed, with padding"]
    tensors = heads(forest, 4, 4, torch.float64, value_width=12)
    layout = ForestLayout(forest, torch.device("cpu"))
    found = values_and_gradients(lambda q, k, v: attend_forest(q, k, v, layout, SCALE), tensors)
    expected = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradients_that_are_not_contiguous_are_taken():
    forest = FORESTS["one prompt"]
    query, key, value = heads(forest, 4, 2, torch.float64)
    merged_attention(query, key, value, forest.trees, SCALE).sum().backward()  # an expanded gradient
    meant = torch.autograd.grad(dense(query, key, value, forest).sum(), (query, key, value))
    for tensor, grad in zip((query, key, value), meant, strict=True):
        torch.testing.assert_close(tensor.grad, grad)


def test_it_runs_on_tensors_without_numbers():
    forest = FORESTS["mixed, with padding"]
    with FakeTensorMode():
        tensors = [torch.empty(1, h, length_of(forest), 16, requires_grad=True) for h in (6, 2, 2)]
        out = merged_attention(*tensors, forest.trees, SCALE)
        out.sum().backward()
        assert out.shape == (1, length_of(forest), 6, 16)
        assert [x.grad.shape for x in tensors] == [x.shape for x in tensors]
