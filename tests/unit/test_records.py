"""Metrics carry their own reduction, and lose nothing on the way."""

from __future__ import annotations

import pytest
import torch

from lowpeak.records import Metric


@pytest.mark.parametrize(("kind", "kept"), [("max", 2**40 + 3), ("min", 2**40 + 1)])
def test_extremes_of_python_numbers_are_exact(kind, kept):
    merged = Metric(float(2**40 + 1), 1.0, kind).merge(Metric(float(2**40 + 3), 1.0, kind))
    assert merged.value() == kept


@pytest.mark.parametrize(("kind", "kept"), [("max", 3.0), ("min", 2.0)])
def test_a_number_and_a_tensor_merge(kind, kept):
    assert Metric(torch.tensor(3.0), 1.0, kind).merge(Metric(2.0, 1.0, kind)).value() == kept
