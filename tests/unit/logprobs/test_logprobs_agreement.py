"""Passes over the logits that differ from torch's, or fail, are found before anything trains with them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from lowpeak.logprobs import softmax_passes as rows
from lowpeak.logprobs.agreement import passes_differ

CPU = torch.device("cpu")


def passes(statistics=rows.row_statistics, gradient=rows.row_gradient_, chosen=rows.chosen_logits):
    return SimpleNamespace(chosen_logits=chosen, row_statistics=statistics, row_gradient_=gradient)


def off_by_little(raw, *inputs):
    found = rows.row_gradient_(raw, *inputs)
    found[0, 0] += 0.01 * found.abs().max()
    return found


def off_in_bf16(raw, *inputs):
    found = rows.row_gradient_(raw, *inputs)
    inputs[-1][-1, -1] = found.abs().max()
    return found


def no_numbers(raw, *inputs):
    return rows.row_gradient_(raw, *inputs).mul_(float("nan"))


def forgets_the_cap(raw, bias, settings):
    return rows.row_statistics(
        raw, bias, settings if settings.scale.softcap is None else type(settings)(5, 0.7, entropy=True)
    )


def short_of_the_maximum(*inputs):
    return rows.chosen_logits(*inputs) * (1 - 1e-6)


def fails(raw, bias, settings):
    raise RuntimeError("no kernel image is available\nfor this device")


def test_the_same_passes_agree():
    assert passes_differ(rows, CPU) is None


@pytest.mark.parametrize(
    "other",
    [
        {"gradient": off_by_little},
        {"gradient": off_in_bf16},
        {"gradient": no_numbers},
        {"statistics": forgets_the_cap},
        {"chosen": short_of_the_maximum},
    ],
    ids=lambda other: next(iter(other.values())).__name__,
)
def test_passes_that_compute_something_else_are_found(other):
    assert re.search(r"\b(\d\S*|nan) ", passes_differ(passes(**other), CPU))


def test_a_failure_is_a_reason():
    assert passes_differ(passes(fails), CPU) == "RuntimeError: no kernel image is available"
