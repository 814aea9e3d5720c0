"""The reference's moving average: in fp32 exactly, in bf16 without bias, also for shares that nearest rounding loses."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from lowpeak.optim.formats import rounding_noise, split_weights
from lowpeak.parallel.base import Replicated

SHARE, SYNCS = 0.01, 100


def layer(dtype: torch.dtype, seed: int, scale: float, base: torch.Tensor | None = None) -> nn.Module:
    """A matrix and a bias: normal numbers of this scale, added to a base."""
    made = nn.Linear(512, 256, bias=False)
    values = torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(seed)) * scale
    made.weight = nn.Parameter((values if base is None else base.float() + values).to(dtype))
    return made


@pytest.fixture
def strategy() -> Replicated:
    return Replicated(Accelerator(cpu=True))


def test_a_hundred_small_shares_bring_the_bf16_reference_as_far_as_the_fp32_one(strategy):
    start = layer(torch.bfloat16, 0, 0.02)
    exact = layer(torch.float32, 0, 0.0, start.weight.detach())
    policy = layer(torch.bfloat16, 1, 1e-3, start.weight.detach())
    reference, nearest = (layer(torch.bfloat16, 0, 0.0, start.weight.detach()) for _ in range(2))
    for step in range(SYNCS):
        strategy.average(reference, policy, SHARE, f"0/reference/{step}")
        strategy.average(exact, policy, SHARE, "")
        nearest.weight.data.lerp_(policy.weight.detach().bfloat16(), SHARE)
    exact_update = (policy.weight.float() - start.weight.float()).flatten()

    def progress(model: nn.Module) -> float:
        return float(
            (model.weight.float() - start.weight.float()).flatten() @ exact_update / (exact_update @ exact_update)
        )

    assert reference.weight.dtype == torch.bfloat16
    assert progress(exact) == pytest.approx(1 - (1 - SHARE) ** SYNCS, abs=1e-3)
    assert progress(reference) == pytest.approx(progress(exact), abs=0.01)
    assert progress(nearest) < 0.2
    errors = reference.weight.float() - exact.weight
    assert float(errors.mean()) == pytest.approx(0, abs=5 * float(errors.std()) / errors.numel() ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_average_is_that_of_the_definition(strategy, dtype):
    """The fp32 average, rounded with the noise of the key, the name and the position."""
    reference, policy = layer(torch.bfloat16, 0, 0.02), layer(dtype, 1, 0.02)
    mixed = (1 - SHARE) * reference.weight.detach().double() + SHARE * policy.weight.detach().double()
    noise = rounding_noise("7/reference/3/weight", 0, mixed.numel(), 16, mixed.device)
    expected, _ = split_weights(mixed.float().flatten(), 16, noise)
    strategy.average(reference, policy, SHARE, "7/reference/3")
    found = reference.weight.detach().flatten()
    # The last bit of an fp32 average may decide between two bf16 numbers, in one of 2**16 values.
    assert (found != expected).sum() <= 10
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


def test_the_whole_policy_is_a_share_of_one(strategy):
    reference, policy = layer(torch.bfloat16, 0, 0.02), layer(torch.bfloat16, 1, 0.02)
    strategy.average(reference, policy, 1.0, "0/reference/1")
    assert torch.equal(reference.weight, policy.weight)
