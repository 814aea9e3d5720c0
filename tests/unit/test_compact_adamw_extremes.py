"""CompactAdamW on zero, denormal and huge weights, and on gradients whose squares fp32 does not have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from extreme_steps import FORMATS, GRADIENTS, LARGEST, WEIGHTS, read, steps
from lowpeak.optim.compact_adamw import CompactAdamW
from lowpeak.optim.formats import join_weights, split_weights

NOT_FINITE = torch.tensor([0x7F800000, -0x800000, 0x7F800001, 0x7FC00000, -0x400000, 0x7FFFFFFF, -1], dtype=torch.int32)


def most_noise(values: torch.Tensor, weight_bits: int) -> torch.Tensor | None:
    return None if weight_bits == 32 else torch.full_like(values, (1 << (32 - weight_bits)) - 1, dtype=torch.int32)


@pytest.mark.parametrize(("weight_bits", "largest"), [(32, 0x7F7F7FFF), (24, 0x7F7F7F00), (16, 0x7F7F0000)])
def test_finite_weights_stay_finite_and_the_largest_of_the_format_bounds_them(weight_bits, largest):
    bound = torch.tensor(largest, dtype=torch.int32).view(torch.float32)
    values = torch.tensor([*WEIGHTS, -3.3961776e38, float(bound), 3.39e38])
    weights, low = split_weights(values, weight_bits, most_noise(values, weight_bits))
    joined = join_weights(weights, low)
    assert weights.isfinite().all()
    assert float(joined.abs().max()) == float(bound)
    assert torch.equal(joined.sign(), values.sign()) or weight_bits < 32
    within = values.abs() <= bound
    if weight_bits == 32:
        assert torch.equal(joined[within].view(torch.int32), values[within].view(torch.int32))
    assert torch.equal(joined[~within], values[~within].sign() * bound)


@pytest.mark.parametrize("weight_bits", [32, 24, 16])
def test_weights_that_are_not_finite_show_it_in_their_bf16(weight_bits):
    """Adding to the bits of a NaN may give zero; a GPU's NaN, 0x7FFFFFFF, is one of those."""
    values = NOT_FINITE.view(torch.float32)
    weights, low = split_weights(values, weight_bits, most_noise(values, weight_bits))
    assert weights.isnan().all()
    assert join_weights(weights, low).isnan().all()


@pytest.mark.parametrize(("weight_bits", "state_bits"), FORMATS)
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_every_value_stays_finite(gradients, weight_bits, state_bits):
    optimizer, weight = steps(gradients, weight_bits, state_bits, None)
    assert weight.isfinite().all()
    for values in read(optimizer, weight).values():
        assert values.isfinite().all()


@pytest.mark.parametrize("gradients", [each for each in GRADIENTS if abs(each) < 1e19])
def test_32_bits_are_the_fp32_adamw_at_every_size_that_it_squares(gradients):
    optimizer, weight = steps(gradients, 32, 32, None, weight_decay=0.0)
    values = torch.tensor(WEIGHTS).repeat(weight.shape[0], weight.shape[1] // len(WEIGHTS))
    exact = nn.Parameter(values.clamp(-3.396177e38, 3.396177e38))
    adamw = torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.0, foreach=False)
    signs = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    for step in range(3):
        exact.grad = (signs.clamp(-1, 1) * gradients * (step < 2)).bfloat16().float()
        exact.grad[0] = 0
        adamw.step()
    # The start of the largest weights is rounded differently; the others are compared.
    small = exact.detach().abs() < 3.39e38
    found = read(optimizer, weight)
    torch.testing.assert_close(found["weight"][small], exact.detach()[small], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found["exp_avg_sq"], adamw.state[exact]["exp_avg_sq"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("weight_bits", "state_bits"), FORMATS)
def test_huge_gradients_move_weights_by_about_a_learning_rate(weight_bits, state_bits):
    """Without a bound of the gradient the second moment would be infinite, and in 8 bits its whole block not a number."""
    weight = nn.Parameter(torch.full((64, 96), 0.02, dtype=torch.bfloat16))
    optimizer = CompactAdamW([weight], lr=1e-3, weight_decay=0.0, weight_bits=weight_bits, state_bits=state_bits)
    for number in range(4):
        weight.grad = torch.full_like(weight, 1e30)
        optimizer.step()
        found = read(optimizer, weight)
        expected = torch.full((64, 96), 0.02).bfloat16().float() - (number + 1) * 1e-3
        # Each step of 16 bits rounds to a neighbour, and bf16 numbers around 0.02 are 2**-13 apart.
        allowed = (number + 1) * 2**-13 if weight_bits == 16 else 2e-5
        torch.testing.assert_close(found["weight"], expected, rtol=0, atol=allowed)


@pytest.mark.parametrize(("weight_bits", "state_bits"), FORMATS)
def test_zero_gradients_with_zero_moments_change_no_bit(weight_bits, state_bits):
    optimizer, weight = steps(0.0, weight_bits, state_bits, None, weight_decay=0.0)
    found, start = read(optimizer, weight), steps(0.0, weight_bits, state_bits, None, lr=0.0)
    assert torch.equal(found["weight"].view(torch.int32), read(*start)["weight"].view(torch.int32))
    assert not found["exp_avg"].any()
    assert not found["exp_avg_sq"].any()


@pytest.mark.parametrize(("weight_bits", "state_bits"), FORMATS)
def test_a_row_without_gradients_keeps_its_extremes(weight_bits, state_bits):
    optimizer, weight = steps(1e30, weight_bits, state_bits, None, weight_decay=0.0)
    untouched, _ = steps(0.0, weight_bits, state_bits, None, weight_decay=0.0)
    before = read(untouched, untouched.param_groups[0]["params"][0])["weight"][0]
    assert torch.equal(read(optimizer, weight)["weight"][0].view(torch.int32), before.view(torch.int32))


def test_a_parameter_without_a_gradient_has_no_state_and_keeps_its_bits():
    moved, still = (nn.Parameter(torch.tensor(WEIGHTS).clamp(-3e38, 3e38).bfloat16()) for _ in range(2))
    optimizer = CompactAdamW([moved, still], lr=1e-2)
    before = still.detach().clone()
    moved.grad = torch.full_like(moved, LARGEST / 2)
    optimizer.step()
    assert still not in optimizer.state
    assert torch.equal(still.view(torch.int16), before.view(torch.int16))
    assert moved.isfinite().all()
