"""Metrics carry their own reduction, and lose nothing on the way."""

from __future__ import annotations

import pytest
import torch

from lowpeak.records import Metric


@pytest.mark.parametrize("numbers", [(2.0**40 + 1, 2.0**40 + 3), (2.0, torch.tensor(3.0))])
def test_extremes_of_numbers_and_tensors_are_exact(numbers):
    for kind, kept in zip(("min", "max"), numbers, strict=True):
        first, second = (Metric(number, 1.0, kind) for number in numbers)
        assert first.merge(second).value() == second.merge(first).value() == kept
