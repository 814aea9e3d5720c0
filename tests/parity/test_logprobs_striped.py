"""Vocabulary stripes outermost: the same values and gradients as the definition, whatever the stripes and blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowpeak.logprobs.chunked import chunked_logprobs, one_visit
from lowpeak.logprobs.definition import ChunkSettings, HeadScale, naive_logprobs
from lowpeak.logprobs.striped import StripedGradients, StripedHead

NUM_IDS, WIDTH = 41, 6
SETTINGS = {
    "plain": ChunkSettings(1),
    "temperature": ChunkSettings(2, 0.7),
    "softcap and entropy": ChunkSettings(2, 1.3, HeadScale(0.8, 1.5), entropy=True, entropy_grad=True),
}


def top1(settings, leaves):
    """The greatest finished logit of each token, by its id."""
    return settings.scale.apply(torch.nn.functional.linear(*(x.double() for x in leaves))).argmax(-1)


def make(num_tokens, dtype=torch.float64, weight_dtype=None, bias=True):
    torch.manual_seed(num_tokens)
    weight_dtype = weight_dtype or dtype
    leaves = [
        torch.randn(num_tokens, WIDTH).to(dtype).requires_grad_(),
        torch.randn(NUM_IDS, WIDTH).to(weight_dtype).requires_grad_(),
        torch.randn(NUM_IDS).to(weight_dtype).requires_grad_() if bias else None,
    ]
    targets = torch.randint(NUM_IDS, (num_tokens,))
    targets[:2] = torch.tensor([0, NUM_IDS - 1])
    return leaves, targets, torch.randn(num_tokens, dtype=torch.float64), torch.randn(num_tokens, dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("num_tokens", [3, 16, 37])  # fewer than a block, a block, three blocks with an odd last one
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_values_and_every_gradient_equal_the_definition(settings, num_tokens, bias):
    leaves, targets, by_logprobs, by_entropy = make(num_tokens, bias=bias)
    by_entropy = by_entropy if settings.entropy else None
    logprobs, entropy = naive_logprobs(*leaves, targets, settings.temperature, settings.scale)
    loss = (logprobs * by_logprobs).sum() + (0 if by_entropy is None else (entropy * by_entropy).sum())
    truth = torch.autograd.grad(loss, [x for x in leaves if x is not None])
    with torch.no_grad():
        head = StripedHead(*leaves, targets, settings)
        ours, ours_entropy = head.values()
        sums = StripedGradients(leaves[0], leaves[1], (True, True, bias), direct=False)
        head.gradients(by_logprobs, by_entropy, sums)
    torch.testing.assert_close(ours, logprobs)
    if settings.entropy:
        torch.testing.assert_close(ours_entropy, entropy)
    found = sums.scaled(torch.tensor(2.0), [torch.float64] * 3)
    for mine, exact in zip(found, truth, strict=False):
        torch.testing.assert_close(mine, 2 * exact)


@pytest.mark.parametrize("num_tokens", [3, 37])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_targets_that_no_stripe_has_a_greater_logit_than_are_top_1(settings, num_tokens):
    leaves, targets, _, _ = make(num_tokens)
    targets[::2] = top1(settings, leaves)[::2]
    is_top1 = torch.empty(num_tokens, dtype=torch.bool)
    with torch.no_grad():
        StripedHead(*leaves, targets, replace(settings, is_top1_T=is_top1)).values()
    assert torch.equal(is_top1, top1(settings, leaves) == targets)
    assert not is_top1.all()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("before", [False, True], ids=["none before", "one before"])
def test_a_direct_gradient_is_rounded_once_onto_what_stands(weight_dtype, before):
    leaves, targets, by_logprobs, _ = make(37, torch.bfloat16, weight_dtype)
    settings = SETTINGS["temperature"]
    wide = [x.detach().bfloat16().double().requires_grad_() for x in leaves[:2]] + [leaves[2].detach().double()]
    logprobs, _ = naive_logprobs(*wide, targets, settings.temperature)
    (exact,) = torch.autograd.grad((logprobs * by_logprobs).sum(), wide[1])
    standing = torch.randn(NUM_IDS, WIDTH).to(weight_dtype)
    leaves[1].grad = standing.clone() if before else None
    with torch.no_grad():
        head = StripedHead(*leaves, targets, settings)
        head.values()
        sums = StripedGradients(leaves[0], leaves[1], (True, True, False), direct=True)
        head.gradients(by_logprobs.float(), None, sums)
        sums.settle()
    exact = exact + standing.double() if before else exact
    # A logit's gradient may be rounded to bf16 inside of a product; the sum is rounded once.
    tolerance = {"rtol": 2**-7, "atol": 2**-6}
    torch.testing.assert_close(leaves[1].grad.double(), exact, **tolerance)
    assert leaves[1].grad.dtype == weight_dtype


def test_frozen_inputs_get_nothing():
    leaves, targets, by_logprobs, _ = make(37)
    with torch.no_grad():
        head = StripedHead(*leaves, targets, SETTINGS["plain"])
        head.values()
        sums = StripedGradients(leaves[0], leaves[1], (True, False, False), direct=True)
        head.gradients(by_logprobs, None, sums)
    by_hidden, by_weight, by_bias = sums.scaled(None, [torch.float64] * 3)
    assert by_hidden is not None
    assert (by_weight, by_bias, leaves[1].grad) == (None, None, None)


@pytest.mark.parametrize("num_tokens", [5, 64])  # one chunk, which is not striped, and several
def test_bf16_passes_with_and_without_gradients_agree_where_their_chunks_are_the_same(num_tokens):
    leaves, targets, weights, _ = make(num_tokens, torch.bfloat16)
    settings = ChunkSettings(8, entropy=True, promised_scale=1.0)

    def loss(logprobs, entropy, start, stop):
        return (logprobs * weights[start:stop]).sum()

    with torch.no_grad():
        scored, scored_entropy = chunked_logprobs(*leaves, targets, settings)
    _, visited, visited_entropy = one_visit(*leaves, targets, loss, settings)
    recomputed, _ = chunked_logprobs(*leaves, targets, settings)
    assert torch.equal(scored, visited)
    assert torch.equal(scored, recomputed.detach())
    assert torch.equal(scored_entropy, visited_entropy)
