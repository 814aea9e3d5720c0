"""Tensors from two ways of computing the same thing are equal up to rounding.

The rounding error of a sum is relative to its terms. What is left where large terms cancel may be off by more than any
bound on its relative error, and by how much depends on the order in which a processor's kernels add. So bounds here are
relative to a tensor's largest number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LEAST_SHARE = 1 / 16


def assert_close_to_largest(actual: Tensor, expected: Tensor, bound: float) -> None:
    """Assert |actual - expected| <= bound * max|expected| for each number."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=bound * _largest(expected))


def assert_each_close_to_largest(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float) -> None:
    """Assert the same of each of a model's weights or gradients; a tensor below 1/16 of the largest is held to that share.

    A gradient may be zero but for rounding, as that of a key's bias before a softmax: the terms of its sum are not.
    """
    assert actual.keys() == expected.keys()
    least = LEAST_SHARE * max(_largest(tensor) for tensor in expected.values())
    for name, tensor in expected.items():
        atol = bound * max(_largest(tensor), least)
        torch.testing.assert_close(
            actual[name], tensor, rtol=0.0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item()
