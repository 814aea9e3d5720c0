"""Gradients that are summed outside of `.grad`: values, norm, clipping, and what is in memory while backward runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import cycle

import pytest
import torch
from torch import nn

from lowpeak.optim.compact_adamw import CompactAdamW, UpdatedShard
from lowpeak.optim.gradient_sums import GradientSum, find_sum, gradient_of, multiply_gradient
from lowpeak.optim.host_memory import HostMemory, add_on_host
from lowpeak.parallel.gradients import clip_grad_norm

CPU = torch.device("cpu")


def layers(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to(dtype)


def run_micro_batches(model: nn.Module, count: int = 5) -> None:
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(8, 16, generator=generator).to(next(model.parameters()).dtype)
        model(inputs).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sum_dtype", [torch.bfloat16, torch.float32])
def test_a_sum_is_that_of_the_micro_batches_gradients(dtype, sum_dtype):
    model = layers(dtype)
    expected = [torch.zeros_like(p, dtype=sum_dtype) for p in model.parameters()]
    for number in range(5):
        twin = layers(dtype)
        generator = torch.Generator().manual_seed(number)
        twin(torch.randn(8, 16, generator=generator).to(dtype)).square().sum().backward()
        for total, parameter in zip(expected, twin.parameters(), strict=True):
            total.add_(parameter.grad)
    for parameter in model.parameters():
        GradientSum(parameter, sum_dtype)
    run_micro_batches(model)
    for total, parameter in zip(expected, model.parameters(), strict=True):
        assert parameter.grad is None
        assert torch.equal(gradient_of(parameter).view_as(total), total)


def test_one_gradient_at_a_time_is_beside_the_weights():
    model = layers()
    alive = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
        GradientSum(parameter, torch.float32)
    run_micro_batches(model)
    assert set(alive) == {1}


@pytest.mark.parametrize("first", ["rows", "selected", "whole"])
def test_parts_add_up_whichever_comes_first(first):
    weight = nn.Parameter(torch.zeros(6, 4))
    added = GradientSum(weight, torch.float32)
    ids, values, rows, whole = torch.tensor([5, 1, 5]), torch.randn(3, 4), torch.randn(2, 4), torch.randn(6, 4)
    parts = {
        "rows": lambda: added.add_rows(1, rows),
        "selected": lambda: added.add_selected_rows(ids, values),
        "whole": lambda: added.add(0, whole.view(-1)),
    }
    for name in (first, *(name for name in parts if name != first)):
        parts[name]()
    expected = whole.clone()
    expected[1:3] += rows
    expected.index_add_(0, ids, values)
    torch.testing.assert_close(gradient_of(weight).view(6, 4), expected)
    added.clear()
    assert gradient_of(weight) is None
    added.add_rows(0, rows)
    torch.testing.assert_close(gradient_of(weight).view(6, 4)[:2], rows)
    assert not gradient_of(weight).view(6, 4)[2:].any()


def test_clipping_scales_sums_and_bf16_gradients_by_their_exact_norm():
    model = layers()
    for parameter in list(model.parameters())[:5]:
        GradientSum(parameter, torch.float32)
    run_micro_batches(model)
    before = [gradient_of(p).double() for p in model.parameters()]
    exact = float(torch.cat(before).norm())
    parameters = [*model.parameters(), nn.Parameter(torch.zeros(2))]  # the last has no gradient
    assert float(clip_grad_norm(parameters, 1.0, CPU)) == pytest.approx(exact, rel=1e-6)
    for parameter, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(gradient_of(parameter).double(), was / exact, rtol=5e-3, atol=0)


def test_a_step_takes_sums_and_empties_them():
    model, twin = layers(), layers()
    for parameter in model.parameters():
        GradientSum(parameter, torch.bfloat16)
    ours, theirs = (CompactAdamW(each.parameters(), lr=1e-3) for each in (model, twin))
    for _ in range(3):
        for each, optimizer in ((model, ours), (twin, theirs)):
            run_micro_batches(each)
            optimizer.step()
            each.zero_grad()
    assert all(gradient_of(p) is None for p in model.parameters())
    for mine, others in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, others)


def test_a_removed_sum_leaves_gradients_to_the_parameter():
    weight = nn.Parameter(torch.ones(3))
    GradientSum(weight, torch.float32).remove()
    weight.sum().backward()
    assert find_sum(weight) is None
    assert torch.equal(gradient_of(weight), torch.ones(3))
    multiply_gradient(weight, torch.tensor(2.0))
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_addition_on_the_host_has_the_bits_of_torchs_addition(dtype, total_dtype):
    generator = torch.Generator().manual_seed(0)
    total, values = (torch.randn(200_001, generator=generator) for _ in range(2))
    total, values = total.to(total_dtype), values.to(dtype)
    expected = total + values
    add_on_host(total, values, overwrite=False)
    assert torch.equal(total, expected.to(total_dtype))
    add_on_host(total, values, overwrite=True)
    assert torch.equal(total, values.to(total_dtype))


class FakeSlot:
    """A stream that records its use; its operations run at once."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def begin(self) -> AbstractContextManager[None]:
        self._log.append(f"begin {self._name}")
        return nullcontext()

    def join(self) -> None:
        self._log.append(f"join {self._name}")

    def synchronize(self) -> None:
        """Do nothing."""


def test_tensors_visit_the_device_in_turn_and_are_awaited_once_before_any_is_published():
    log: list[str] = []
    model, twin = layers(torch.float32), layers(torch.float32)
    for each in (model, twin):
        run_micro_batches(each)
    optimizer, expected = (CompactAdamW(each.parameters(), offload=True, weight_bits=None) for each in (model, twin))
    host = optimizer._hosts[CPU] = HostMemory(CPU)
    host.piece, host._slots = 200, [FakeSlot("a", log), FakeSlot("b", log)]
    host._next = cycle(host._slots)
    first = next(iter(model.parameters()))
    optimizer.place({first: UpdatedShard("0", 0, 0, first.numel(), lambda: log.append("publish"))})
    optimizer.step()
    expected.step()
    visits = 4 * (2 + 1)  # a weight of 256 values in two pieces, and a bias
    assert log == ["begin a", "begin b"] * (visits // 2) + ["join a", "join b", "publish"]
    for ours, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, other)
