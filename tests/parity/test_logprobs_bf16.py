"""bf16 heads that are large enough to be widened in several stripes."""

from __future__ import annotations

import pytest
import torch

from closeness import assert_close_to_largest
from lowpeak.logprobs.chunked import chunked_logprobs, one_visit
from lowpeak.logprobs.definition import ChunkSettings, naive_logprobs

NUM_IDS, WIDTH, NUM_TOKENS = 4_500, 1_024, 48  # more than a stripe of 2**22 numbers, the last one narrower
SETTINGS = ChunkSettings(32, 0.9)


def leaves_and_targets():
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH).bfloat16().requires_grad_()
    weight = (torch.randn(NUM_IDS, WIDTH) / 16).bfloat16().requires_grad_()
    return [hidden, weight], torch.randint(NUM_IDS, (NUM_TOKENS,))


def token_loss(logprobs, entropy, start, stop):
    return (logprobs * torch.linspace(-1, 1, NUM_TOKENS, dtype=logprobs.dtype)[start:stop]).sum()


def recomputed(leaves, targets):
    logprobs, _ = chunked_logprobs(*leaves, None, targets, SETTINGS)
    return token_loss(logprobs, None, 0, NUM_TOKENS), logprobs


def visited(leaves, targets):
    return one_visit(*leaves, None, targets, token_loss, SETTINGS)[:2]


def naive(leaves, targets):
    logprobs, _ = naive_logprobs(*leaves, None, targets, SETTINGS.temperature)
    return token_loss(logprobs, None, 0, NUM_TOKENS), logprobs


@pytest.mark.parametrize("way", [recomputed, visited])
def test_logits_of_bf16_operands_are_not_rounded_to_bf16(way):
    leaves, targets = leaves_and_targets()
    _, exact = naive([x.double() for x in leaves], targets)
    _, ours = way(leaves, targets)
    assert_close_to_largest(ours.double(), exact, 2e-6)
    assert (naive(leaves, targets)[1] - exact).abs().max() > 1e-3  # what rounding would cost


@pytest.mark.parametrize("way", [recomputed, visited])
def test_gradients_of_every_stripe_are_as_near_to_exact_as_naive_ones(way):
    leaves, targets = leaves_and_targets()
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = torch.autograd.grad(3.0 * naive(wide, targets)[0], wide)
    theirs = torch.autograd.grad(3.0 * naive(leaves, targets)[0], leaves)
    ours = torch.autograd.grad(3.0 * way(leaves, targets)[0], leaves)
    for found, peer, exact in zip(ours, theirs, truth, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - exact).norm() <= (peer.double() - exact).norm()
