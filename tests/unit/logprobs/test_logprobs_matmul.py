"""Small batches before a large head on a CPU: oneDNN multiplies them, to the same logits."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowpeak.heads.lm_head import install_head
from lowpeak.logprobs.matmul import linear, wide_linear
from rounding import assert_close_to_largest
from tiny_models import tiny_model

HAS_ONEDNN = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
LARGE, WIDTH = 1 << 17, 128  # 64 MB of fp32


class Operators(TorchDispatchMode):
    """A record of the names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def has_onednn(self) -> bool:
        return "mkldnn._linear_pointwise.default" in self.names


@pytest.fixture(scope="module")
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, LARGE)


def ran_by_onednn(hidden, weight, bias=None) -> bool:
    with Operators() as operators:
        linear(hidden, weight, bias)
    return operators.has_onednn


@pytest.mark.parametrize(("shape", "has_bias"), [((3,), True), ((5, 2), False), ((15, 1), True), ((64,), False)])
def test_a_few_rows_before_a_large_head_have_its_logits(head, shape, has_bias):
    # A non-contiguous slice of the last position, as generation makes it.
    hidden = torch.randn(*shape, 4, WIDTH)[..., -1, :]
    bias = head.bias if has_bias else None
    with torch.no_grad(), Operators() as operators:
        logits = linear(hidden, head.weight, bias)
        exact = hidden.double() @ head.weight.double().T + (bias if has_bias else 0)
    assert operators.has_onednn == HAS_ONEDNN
    assert logits.shape == (*shape, LARGE)
    assert logits.is_contiguous()
    assert_close_to_largest(logits.double(), exact, 2e-6)


def test_other_numbers_of_rows_small_heads_other_dtypes_and_gradients_keep_the_plain_product(head):
    with torch.no_grad():
        assert not any(ran_by_onednn(torch.randn(num_rows, WIDTH), head.weight) for num_rows in (0, 1, 2, 65))
    hidden = torch.randn(8, WIDTH)
    assert not ran_by_onednn(hidden, head.weight)
    with torch.no_grad():
        assert ran_by_onednn(hidden, head.weight) == HAS_ONEDNN
        assert not ran_by_onednn(hidden, head.weight[: LARGE // 2])
        assert not ran_by_onednn(hidden.double(), head.weight.double())
        assert not ran_by_onednn(hidden, head.weight, torch.randn(2 * LARGE)[::2])
        with torch.autocast("cpu", torch.bfloat16):
            assert not ran_by_onednn(hidden, head.weight)
    linear(hidden.requires_grad_(), head.weight, head.bias).sum().backward()
    assert_close_to_largest(hidden.grad, head.weight.detach().sum(0).expand_as(hidden), 1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tied", [True, False])
def test_an_installed_head_multiplies_a_few_rows_so(tied, mode):
    model = tiny_model(LARGE, hidden=WIDTH, layers=1, tied=tied)
    ids = torch.randint(2, LARGE, (7, 5))
    with torch.no_grad():
        expected = model(input_ids=ids, logits_to_keep=1).logits
    installed = copy.deepcopy(install_head(model))
    with mode(), Operators() if mode is torch.no_grad else contextlib.nullcontext() as operators:
        logits = installed(input_ids=ids, logits_to_keep=1).logits
    assert operators is None or operators.has_onednn == HAS_ONEDNN
    assert_close_to_largest(logits, expected, 2e-6)


def test_a_head_cast_to_fp32_multiplies_a_few_rows_so():
    model = tiny_model(LARGE, hidden=WIDTH, layers=1)
    hidden = torch.randn(8, 1, WIDTH).bfloat16()
    expected = hidden.float() @ model.lm_head.weight.T.detach()
    install_head(model, cast_head_to_fp32=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Operators() as operators:
        logits = model.lm_head(hidden)
    assert operators.has_onednn == HAS_ONEDNN
    assert_close_to_largest(logits, expected, 2e-6)


@pytest.mark.parametrize("num_rows", [0, 40])
def test_wide_logits_of_a_bf16_head_are_not_rounded(num_rows):
    weight, hidden = torch.randn(num_rows, WIDTH).bfloat16(), torch.randn(3, 2, WIDTH).bfloat16()
    bias = torch.randn(num_rows).bfloat16()
    with torch.no_grad():
        logits = wide_linear(hidden, weight, bias)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits.double(), hidden.double() @ weight.double().T + bias.double(), rtol=1e-6, atol=1e-5
    )
