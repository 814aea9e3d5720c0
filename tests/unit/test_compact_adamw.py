"""CompactAdamW against torch's AdamW in fp32, and its formats against their definitions."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowpeak.optim.compact_adamw import CompactAdamW, UpdatedShard, clear_low_bits
from lowpeak.optim.formats import (
    decode_first_moment,
    decode_second_moment,
    encode_first_moment,
    encode_second_moment,
    join_weights,
    rounding_noise,
    split_weights,
)

CPU = torch.device("cpu")
EXTREMES = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 1e-8, 1.0, -1e38, 3e38])


def magnitudes(count: int = 100_000) -> torch.Tensor:
    """Random numbers of every magnitude."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.empty(count).uniform_(-38, 38, generator=generator)
    return torch.cat([torch.randn(count, generator=generator) * 10**exponents, EXTREMES]).clamp(-3e38, 3e38)


def layers(dtype: torch.dtype = torch.float32, rows: int = 70, columns: int = 128) -> nn.Module:
    """A matrix with rows of one block, one whose rows no block divides, and vectors; weights are bf16 numbers."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(columns, rows), nn.Linear(131, rows), nn.LayerNorm(rows))
    return made.bfloat16().to(dtype)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16() * 0.01
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def values_of(optimizer: CompactAdamW, module: nn.Module) -> list[torch.Tensor]:
    return [optimizer.read(p, "weight", 0, p.numel()).view_as(p) for p in module.parameters()]


def test_32_bits_are_the_fp32_weight_and_its_first_16_the_nearest_bf16():
    values = magnitudes()
    weights, low = split_weights(values, 32)
    assert torch.equal(join_weights(weights, low).view(torch.int32), values.view(torch.int32))
    nearest = values.bfloat16()
    is_tie = low == -0x8000
    assert torch.equal(weights[~is_tie], nearest[~is_tie])


@pytest.mark.parametrize(("bits", "step"), [(24, 2.0**-15), (16, 2.0**-7)])
def test_fewer_bits_round_to_a_neighbour_without_bias(bits, step):
    values = torch.full((1 << 18,), 0.0123456789)
    noise = rounding_noise("a", 0, values.numel(), 32 - bits, CPU)
    rounded = join_weights(*split_weights(values, bits, noise))
    assert len(rounded.unique()) == 2
    assert float((rounded - values).abs().max()) <= step * 0.0123456789
    spread = float(rounded.std()) / values.numel() ** 0.5
    assert float(rounded.double().mean() - values.double().mean()) == pytest.approx(0, abs=5 * spread)


def test_noise_depends_on_key_and_position_alone():
    whole = rounding_noise("seed/1/name", 0, 1000, 16, CPU)
    assert torch.equal(whole[300:700], rounding_noise("seed/1/name", 300, 700, 16, CPU))
    assert not torch.equal(whole, rounding_noise("seed/2/name", 0, 1000, 16, CPU))
    far = rounding_noise("seed/1/name", 0, 1 << 16, 16, CPU).double()
    assert float(far.mean()) == pytest.approx(0x7FFF, rel=0.01)
    assert abs(float(torch.corrcoef(torch.stack([far[1:], far[:-1]]))[0, 1])) < 0.02


@pytest.mark.parametrize(
    ("encode", "decode", "codes"),
    [
        (encode_first_moment, decode_first_moment, torch.arange(-127, 128).to(torch.int8)),
        (encode_second_moment, decode_second_moment, torch.arange(256).to(torch.uint8)),
    ],
)
def test_a_state_that_is_decoded_and_encoded_again_has_the_same_bits(encode, decode, codes):
    for scale in [*(torch.rand(500) * 10 ** torch.empty(500).uniform_(-15, 15)), torch.tensor(1.0)]:
        again, scales = encode(decode(codes, scale[None], len(codes)), len(codes))
        assert torch.equal(again, codes)
        assert scales == scale


def test_the_error_of_a_first_moment_of_8_bits_is_small_beside_each_block():
    values = torch.randn(1000, 128).view(-1)
    found = decode_first_moment(*encode_first_moment(values, 128), 128)
    assert float((found - values).abs().max() / values.abs().max()) < 0.01
    zeros = decode_first_moment(*encode_first_moment(torch.zeros(128), 128), 128)
    assert torch.equal(zeros, torch.zeros(128))


@pytest.mark.parametrize(
    ("weight_bits", "state_bits", "tolerance"), [(32, 32, 1e-4), (32, 8, 0.03), (24, 8, 0.1), (24, 32, 0.1)]
)
def test_updates_arrive_as_in_fp32_at_a_small_learning_rate(weight_bits, state_bits, tolerance):
    """At 1e-5 nearest rounding of bf16 weights would lose most of them."""
    exact, compact = layers(), layers(torch.bfloat16)
    start = [p.detach().clone() for p in exact.parameters()]
    train(exact, torch.optim.AdamW(exact.parameters(), lr=1e-5), 60)
    optimizer = CompactAdamW(compact.parameters(), lr=1e-5, weight_bits=weight_bits, state_bits=state_bits)
    train(compact, optimizer, 60)
    for ours, theirs, before in zip(values_of(optimizer, compact), exact.parameters(), start, strict=True):
        if (
            ours.dim() < 2 and weight_bits < 32
        ):  # a LayerNorm's weights are 1, whose next number of 24 bits is 1.5e-5 away
            continue
        assert float((ours - theirs.detach()).norm() / (theirs.detach() - before).norm()) < tolerance


def test_stochastic_rounding_to_bf16_loses_no_update_on_average():
    exact, compact = layers(rows=512), layers(torch.bfloat16, rows=512)
    start = exact[0].weight.detach().clone()
    train(exact, torch.optim.AdamW(exact.parameters(), lr=1e-4), 60)
    train(compact, CompactAdamW(compact.parameters(), lr=1e-4, weight_bits=16), 60)
    exact_update = (exact[0].weight.detach() - start).flatten()
    arrived = (compact[0].weight.detach().float() - start).flatten()
    assert float(exact_update @ arrived / (exact_update @ exact_update)) == pytest.approx(1, abs=0.02)


def test_matrices_have_8_bit_states_and_other_tensors_fp32_ones():
    compact = layers(torch.bfloat16)
    optimizer = CompactAdamW(compact.parameters())
    train(compact, optimizer, 1)
    kinds = {name: optimizer.state[p]["exp_avg"].dtype for name, p in compact.named_parameters()}
    assert kinds == {
        **dict.fromkeys(("0.bias", "1.weight", "1.bias", "2.weight", "2.bias"), torch.float32),
        "0.weight": torch.int8,
    }
    state = optimizer.state[next(compact.parameters())]
    stored = sum(value.numel() * value.element_size() for key, value in state.items() if key != "step")
    assert stored == 70 * 128 * (2 + 2 + 2 * 4 / 128)


def test_the_second_moment_falls_when_gradients_do():
    """In bf16 it would stay: 0.1 % less is below half of bf16's step."""
    weight = nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
    optimizer = CompactAdamW([weight], lr=0.0)
    for step in range(1500):
        weight.grad = torch.full_like(weight, 1e-3 if step < 50 else 1e-5)
        optimizer.step()
    exact = (1 - 0.999**50) * 1e-6 * 0.999**1450 + (1 - 0.999**1450) * 1e-10
    found = optimizer.read(weight, "exp_avg_sq", 0, weight.numel())
    torch.testing.assert_close(found.sqrt(), torch.full_like(found, exact**0.5), rtol=0.15, atol=0)


@pytest.mark.parametrize("options", [{}, {"weight_bits": 16}, {"weight_bits": 24, "state_bits": 32}])
def test_a_run_from_a_state_dict_has_the_same_bits(options):
    whole = layers(torch.bfloat16)
    optimizer = CompactAdamW(whole.parameters(), lr=1e-3, **options)
    train(whole, optimizer, 3)
    copy = layers(torch.bfloat16)
    copy.load_state_dict(whole.state_dict())
    resumed = CompactAdamW(copy.parameters(), lr=1e-3, **options)
    resumed.load_state_dict(optimizer.state_dict())
    train(whole, optimizer, 3, first=3)
    train(copy, resumed, 3, first=3)
    for ours, theirs in zip(values_of(resumed, copy), values_of(optimizer, whole), strict=True):
        assert torch.equal(ours, theirs)


def test_states_of_adamw_in_fp32_are_loaded_and_those_of_another_format_are_an_error():
    exact, compact = layers(), layers(torch.bfloat16)
    adamw = torch.optim.AdamW(exact.parameters(), lr=1e-3)
    train(exact, adamw, 3)
    optimizer = CompactAdamW(compact.parameters(), lr=1e-3)
    optimizer.load_state_dict(adamw.state_dict())
    for ours, theirs in zip(compact.parameters(), exact.parameters(), strict=True):
        moment = optimizer.read(ours, "exp_avg", 0, ours.numel()).view_as(ours)
        torch.testing.assert_close(moment, adamw.state[theirs]["exp_avg"], rtol=0, atol=2e-4)
        assert optimizer.state[ours]["step"] == 3
    with pytest.raises(ValueError, match="parameter 0"):
        CompactAdamW(compact.parameters(), weight_bits=24).load_state_dict(optimizer.state_dict())


def test_low_bits_are_cleared_after_weights_were_written():
    compact = layers(torch.bfloat16)
    optimizer = CompactAdamW(compact.parameters(), lr=1e-3)
    train(compact, optimizer, 2)
    clear_low_bits(optimizer)
    for ours, weights in zip(values_of(optimizer, compact), compact.parameters(), strict=True):
        assert torch.equal(ours, weights.float())


def test_a_shard_of_rows_has_the_bits_of_the_whole_tensor():
    torch.manual_seed(0)
    values, gradients = torch.randn(64, 128), torch.randn(3, 64, 128).bfloat16()
    found = []
    for first in (0, 32):
        weight = nn.Parameter(values[first:].bfloat16())
        optimizer = CompactAdamW([weight], lr=1e-2, weight_bits=16)
        optimizer.place({weight: UpdatedShard("w", first * 128, 0, weight.numel())})
        for gradient in gradients:
            weight.grad = gradient[first:].clone()
            optimizer.step()
        found.append(weight.detach())
    whole, shard = found
    assert torch.equal(shard, whole[32:])


def largest_step(gradients: torch.Tensor, state_bits: int) -> float:
    """The largest change of a weight in one step, in learning rates."""
    weight = nn.Parameter(torch.zeros(gradients.shape[1:]))
    optimizer = CompactAdamW([weight], lr=1e-3, weight_decay=0.0, weight_bits=None, state_bits=state_bits)
    largest = 0.0
    for gradient in gradients:
        before, weight.grad = weight.detach().clone(), gradient
        optimizer.step()
        largest = max(largest, float((weight.detach() - before).abs().max()) / 1e-3)
    return largest


def test_a_second_moment_far_below_its_blocks_largest_bounds_the_step_after_gradients_end():
    """Rounded to zero, it would let the step divide by eps alone: 9,000 learning rates."""
    gradients = torch.zeros(160, 64, 128)
    gradients[1:149, :, 1:] = 1e-4
    gradients[0, :, 0] = 1.0
    assert largest_step(gradients, 8) < 3
    assert torch.equal(encode_second_moment(torch.tensor([0.0, 1e-30, 1.0]), 3)[0], torch.tensor([0, 1, 255]).byte())


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_spiky_gradients_stay_near_those_of_fp32(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.empty(32, 128).uniform_(-6, 1, generator=generator)
    gradients = torch.randn(60, 32, 128, generator=generator) * sizes
    gradients *= torch.rand(gradients.shape, generator=generator) < 0.1
    gradients[40:] = 0
    assert largest_step(gradients, 8) < 2 * largest_step(gradients, 32)


def test_a_check_of_the_kernel_that_ran_out_of_memory_is_made_again(monkeypatch):
    module = importlib.import_module("lowpeak.optim.compact_adamw")
    full = [True]

    def fail_once(step):
        if full:
            full.pop()
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        module.update(step)

    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "lowpeak.optim.triton_step", SimpleNamespace(update=fail_once))
    try:
        with pytest.raises(RuntimeError, match="CUDA"):
            module._cuda_kernel(CPU)
        assert module._cuda_kernel(CPU) is fail_once
    finally:
        module._cuda_kernel.cache_clear()
