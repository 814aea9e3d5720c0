"""What counts as equal up to rounding."""

from __future__ import annotations

import pytest
import torch

from rounding import assert_close_to_largest, assert_each_close_to_largest

LARGE = torch.tensor([2.0, 1e-3])


def test_a_small_number_may_be_off_by_as_much_as_the_largest():
    assert_close_to_largest(LARGE + 1.9e-5, LARGE, 1e-5)
    with pytest.raises(AssertionError, match="close"):
        assert_close_to_largest(LARGE + 2.1e-5, LARGE, 1e-5)


def test_a_tensor_that_is_zero_but_for_rounding_is_held_to_a_share_of_the_largest():
    expected = {"weight": LARGE, "bias": torch.tensor([1e-9])}
    assert_each_close_to_largest(expected | {"bias": torch.tensor([1e-6])}, expected, 1e-5)
    with pytest.raises(AssertionError, match=r"^bias: "):
        assert_each_close_to_largest(expected | {"bias": torch.tensor([2e-6])}, expected, 1e-5)
    with pytest.raises(AssertionError):
        assert_each_close_to_largest({"weight": LARGE}, expected, 1e-5)
