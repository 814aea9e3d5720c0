"""The share of updates that nearest rounding of bf16 weights loses, and the warning that states it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from lowpeak.optim.users_optimizer import lost_share, warn_of_lost_updates


def weights(count: int, scale: float = 0.02) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()


@pytest.mark.parametrize(
    ("rate", "arrives", "tolerance"), [(1e-6, 0.009, 0.003), (1e-5, 0.09, 0.01), (1e-4, 0.73, 0.02), (5e-4, 1.0, 0.01)]
)
def test_of_weights_of_0_02_the_measured_shares_arrive(rate, arrives, tolerance):
    assert 1 - lost_share([(weights(1 << 20), rate)]) == pytest.approx(arrives, abs=tolerance)


def test_the_share_is_that_of_all_tensors_also_where_few_weights_are_sampled():
    small, large = weights(3 << 20, 1e-4).view(-1, 64), weights(1 << 20, 10.0)
    share = lost_share([(small, 1e-4), (large, 1e-4), (torch.ones(5), 1e-4)])
    assert lost_share([(small, 1e-4)]) < 0.001
    assert lost_share([(large, 1e-4)]) > 0.99
    assert share == pytest.approx(0.25, abs=0.01)


def test_there_is_no_share_without_bf16_weights():
    assert lost_share([(torch.ones(5), 1e-4)]) is None


def warnings_of(optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_lost_updates(optimizer)
    return [record.getMessage() for record in caplog.records]


def test_the_warning_has_the_share_the_rate_and_the_remedy(caplog):
    weight = nn.Parameter(weights(1 << 16))
    (message,) = warnings_of(torch.optim.SGD([weight], lr=1e-6), caplog)
    assert all(text in message for text in ("SGD", " 99.", "1e-06", "weight_bits=32"))
    scheduled = torch.optim.SGD([weight], lr=1e-6)
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 0.0)
    assert warnings_of(scheduled, caplog) == [message]


def test_optimizers_that_lose_nothing_are_not_warned_of(caplog):
    half, full = nn.Parameter(weights(100)), nn.Parameter(torch.ones(100))
    assert warnings_of(torch.optim.SGD([full], lr=1e-6), caplog) == []
    assert warnings_of(torch.optim.SGD([half], lr=0.1), caplog) == [], "less than 1 %"
    stochastic = torch.optim.SGD([half], lr=1e-6)
    stochastic.bf16_stochastic_round = True
    assert warnings_of(stochastic, caplog) == []
    assert warnings_of(torch.optim.SGD([{"params": [half], "kahan_sum": None}], lr=1e-6), caplog) == []
    assert warnings_of(torch.optim.SGD([{"params": [half], "use_kahan_summation": True}], lr=1e-6), caplog) == []
    assert len(warnings_of(torch.optim.SGD([{"params": [half], "kahan_sum": False}], lr=1e-6), caplog)) == 1
