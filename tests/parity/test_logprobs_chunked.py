"""Chunked log-probs, entropies and every gradient against the naive definition."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import pytest
import torch

from lowpeak.logprobs.chunked import chunked_logprobs, fused_loss
from lowpeak.logprobs.module_head import module_logprobs, module_loss
from lowpeak.logprobs.reference import ChunkSettings, HeadScale, naive_logprobs
from rounding import assert_close_to_largest

SETTINGS = {
    "plain": ChunkSettings(4),
    "temperature": ChunkSettings(4, temperature=0.7),
    "scale": ChunkSettings(4, scale=HeadScale(0.3)),
    "softcap": ChunkSettings(4, scale=HeadScale(1.0, 2.0)),
    "everything": ChunkSettings(3, temperature=1.3, scale=HeadScale(0.8, 1.5), entropy=True, entropy_grad=True),
    "entropy": ChunkSettings(4, temperature=0.7, entropy=True, entropy_grad=True),
    "entropy without its gradient": ChunkSettings(4, entropy=True),
    "one token a chunk": ChunkSettings(1, entropy=True, entropy_grad=True),
    "one chunk": ChunkSettings(100),
}


def inputs(num_tokens=11, num_ids=17, dtype=torch.float64, bias=True, width=6):
    """Leaves [hidden, weight, bias], targets, and a constant per token for a loss."""
    torch.manual_seed(0)
    leaves = [torch.randn(num_tokens, width), torch.randn(num_ids, width) * (6 / width) ** 0.5]
    leaves.append(torch.randn(num_ids) if bias else None)
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in leaves]
    return leaves, torch.randint(num_ids, (num_tokens,)), torch.randn(num_tokens, dtype=torch.float64)


def per_token(weights, logprobs, entropy, start, stop):
    """A nonlinear loss of each token's own log-prob and, where there is one, entropy."""
    cut = weights[start:stop].to(logprobs.dtype)
    return (cut * logprobs.exp()).sum() + (0 if entropy is None else (cut.square() * entropy).sum())


def naive_loss(leaves, targets, weights, settings):
    logprobs, entropy = naive_logprobs(*leaves, targets, settings.temperature, settings.scale)
    entropy = entropy if settings.entropy_grad else entropy.detach() if settings.entropy else None
    return per_token(weights, logprobs, entropy, 0, len(targets)), logprobs, entropy


def recomputed(leaves, targets, weights, settings):
    logprobs, entropy, _ = chunked_logprobs(*leaves, targets, settings)
    return per_token(weights, logprobs, entropy, 0, len(targets)), logprobs, entropy


def visited(leaves, targets, weights, settings):
    return fused_loss(*leaves, targets, functools.partial(per_token, weights), settings)[:3]


def linear(leaves):
    return lambda hidden: torch.nn.functional.linear(hidden, *leaves[1:])


def by_module(leaves, targets, weights, settings):
    logprobs, entropy, _ = module_logprobs(linear(leaves), leaves[0], targets, settings)
    return per_token(weights, logprobs, entropy, 0, len(targets)), logprobs, entropy


def visited_by_module(leaves, targets, weights, settings):
    return module_loss(linear(leaves), leaves[0], targets, functools.partial(per_token, weights), settings)[:3]


WAYS = [recomputed, visited, by_module, visited_by_module]


def gradients(loss, leaves):
    return torch.autograd.grad(2.5 * loss, [x for x in leaves if x is not None and x.requires_grad], retain_graph=True)


def assert_same_gradients(loss, expected, leaves):
    for ours, naive in zip(gradients(loss, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(ours, naive)


SHAPES = [(SETTINGS["entropy"], sizes, True) for sizes in ((1, 17), (4, 1), (9, 1001), (0, 17))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("settings", "sizes", "bias"),
    [(settings, (11, 17), bias) for settings in SETTINGS.values() for bias in (True, False)] + SHAPES,
    ids=[f"{name}-{bias}" for name in SETTINGS for bias in ("bias", "no bias")] + [str(case[1]) for case in SHAPES],
)
def test_values_and_every_gradient_equal_the_definition(way, settings, sizes, bias):
    leaves, targets, weights = inputs(*sizes, bias=bias)
    expected_loss, expected_logprobs, expected_entropy = naive_loss(leaves, targets, weights, settings)
    loss, logprobs, entropy = way(leaves, targets, weights, settings)
    torch.testing.assert_close(logprobs, expected_logprobs)
    torch.testing.assert_close(loss, expected_loss)
    if settings.entropy:
        torch.testing.assert_close(entropy, expected_entropy)
        assert settings.entropy_grad or not entropy.requires_grad
    else:
        assert entropy is None
    assert_same_gradients(loss, expected_loss, leaves)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("name", ["plain", "scale", "everything"])
def test_a_target_is_top_1_where_no_logit_is_greater_and_all_else_stays(way, graph, name):
    leaves, targets, weights = inputs(num_ids=5, dtype=torch.float32)
    logits = torch.nn.functional.linear(*leaves)
    targets[::2] = logits[::2].argmax(-1)
    is_top1 = torch.empty(len(targets), dtype=torch.bool)
    settings = replace(SETTINGS[name], is_top1_T=is_top1)
    with torch.set_grad_enabled(graph):
        without_top1 = way(leaves, targets, weights, SETTINGS[name])
        with_top1 = way(leaves, targets, weights, settings)
        if graph:
            with_top1[0].backward()
    assert torch.equal(is_top1, logits.argmax(-1) == targets)
    assert is_top1[::2].all()
    assert not is_top1.all()
    for one, other in zip(with_top1, without_top1, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_a_target_that_ties_with_the_greatest_logit_is_top_1(way):
    hidden, weight = torch.ones(3, 6), torch.ones(4, 6)
    weight[3] = -1
    is_top1 = torch.empty(3, dtype=torch.bool)
    way([hidden, weight, None], torch.tensor([0, 2, 3]), torch.zeros(3), ChunkSettings(2, is_top1_T=is_top1))
    assert is_top1.tolist() == [True, True, False]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_a_frozen_input_gets_no_gradient_and_the_others_theirs(way, trained):
    leaves, targets, weights = inputs()
    expected, _, _ = naive_loss(leaves, targets, weights, SETTINGS["everything"])
    all_gradients = torch.autograd.grad(expected, leaves)
    frozen = [x.detach().requires_grad_(i in trained) for i, x in enumerate(leaves)]
    loss, _, _ = way(frozen, targets, weights, SETTINGS["everything"])
    loss.backward()
    for i, leaf in enumerate(frozen):
        if i in trained:
            torch.testing.assert_close(leaf.grad, all_gradients[i])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("way", WAYS)
def test_without_gradients_the_values_are_the_same_and_carry_no_graph(way):
    leaves, targets, weights = inputs()
    with_graph = way(leaves, targets, weights, SETTINGS["everything"])
    with torch.no_grad():
        without = way(leaves, targets, weights, SETTINGS["everything"])
    for kept, bare in zip(with_graph, without, strict=True):
        torch.testing.assert_close(kept, bare, rtol=1e-12, atol=1e-12)
        assert not bare.requires_grad


@pytest.mark.parametrize("way", [recomputed, visited])
def test_fp32_stays_within_rounding_of_the_exact_values(way):
    leaves, targets, weights = inputs(num_ids=1001, dtype=torch.float32)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    loss, logprobs, _ = way(leaves, targets, weights, SETTINGS["everything"])
    expected_loss, expected_logprobs, _ = naive_loss(exact, targets, weights, SETTINGS["everything"])
    assert_close_to_largest(logprobs.double(), expected_logprobs, 1e-6)
    for ours, naive in zip(gradients(loss, leaves), gradients(expected_loss, exact), strict=True):
        assert_close_to_largest(ours.double(), naive, 3e-6)


# A head large enough to be widened in several stripes of 2**22 numbers, the last one narrower.
STRIPES = {"num_tokens": 48, "num_ids": 4_500, "width": 1_024}


NARROW = {"num_ids": 257}


@pytest.mark.parametrize(
    ("way", "dtype", "name", "sizes"),
    [
        *product((recomputed, visited), (torch.bfloat16, torch.float16), ("temperature", "everything"), (NARROW,)),
        (recomputed, torch.float16, "temperature", STRIPES),
        (visited, torch.bfloat16, "temperature", STRIPES),
    ],
)
def test_half_precision_is_no_further_from_the_exact_values_than_naive_half_precision(way, dtype, name, sizes):
    leaves, targets, weights = inputs(dtype=dtype, **sizes)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    true_loss, true_logprobs, _ = naive_loss(exact, targets, weights, SETTINGS[name])
    naive, naive_values, _ = naive_loss(leaves, targets, weights, SETTINGS[name])
    loss, logprobs, _ = way(leaves, targets, weights, SETTINGS[name])
    assert logprobs.dtype == torch.float32
    assert_close_to_largest(logprobs.double(), true_logprobs, 2e-6)
    assert (naive_values - true_logprobs).abs().max() > 2e-4  # what rounding logits costs, in fp16 least
    truth = gradients(true_loss, exact)
    for ours, theirs, true in zip(gradients(loss, leaves), gradients(naive, leaves), truth, strict=True):
        assert ours.dtype == dtype
        assert distance(ours, true) <= distance(theirs, true)


def distance(values, truth):
    return float((values.detach().double() - truth.detach()).norm())


def test_a_head_of_another_dtype_is_cast_to_the_hidden_states_and_gets_its_gradient_in_its_own():
    leaves, targets, weights = inputs(dtype=torch.float32)
    hidden = leaves[0].detach().bfloat16().requires_grad_()
    mixed = [hidden, *leaves[1:]]
    rounded = [
        hidden.detach().float().requires_grad_(),
        leaves[1].detach().bfloat16().float().requires_grad_(),
        leaves[2],
    ]
    for way in (recomputed, visited):
        loss, logprobs, _ = way(mixed, targets, weights, SETTINGS["entropy"])
        expected_loss, expected, _ = naive_loss(rounded, targets, weights, SETTINGS["entropy"])
        assert_close_to_largest(logprobs, expected, 2e-6)
        by_hidden, by_weight, by_bias = gradients(loss, mixed)
        true_hidden, true_weight, true_bias = gradients(expected_loss, rounded)
        assert (by_hidden.dtype, by_weight.dtype) == (torch.bfloat16, torch.float32)
        assert_close_to_largest(by_weight, true_weight, 2e-6)
        assert_close_to_largest(by_bias, true_bias, 2e-6)
        assert_close_to_largest(by_hidden.float(), true_hidden, 2**-8)


def test_large_logits_neither_overflow_nor_lose_the_target():
    hidden = torch.tensor([[3e4], [-3e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    settings = ChunkSettings(2, entropy=True, entropy_grad=True)
    logprobs, entropy, _ = chunked_logprobs(hidden, weight, None, torch.tensor([0, 0]), settings)
    assert logprobs.tolist() == [0.0, -6e4]
    assert entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(hidden.grad).all()


def test_a_loss_of_the_entropy_alone_has_its_gradient():
    leaves, targets, _ = inputs()
    settings = ChunkSettings(4, entropy=True, entropy_grad=True)
    value, *_ = fused_loss(*leaves, targets, lambda logprobs, entropy, start, stop: entropy.sum(), settings)
    _, entropy, _ = chunked_logprobs(*leaves, targets, settings)
    _, expected = naive_logprobs(*leaves, targets)
    for loss in (value, entropy.sum()):
        assert_same_gradients(loss, expected.sum(), leaves)


def test_a_second_backward_through_a_fused_loss_is_refused():
    leaves, targets, weights = inputs()
    loss, _, _ = visited(leaves, targets, weights, SETTINGS["plain"])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


def test_the_inputs_are_never_changed():
    leaves, targets, weights = inputs()
    before = [x.detach().clone() for x in (*leaves, targets, weights)]
    for way in WAYS:
        way(leaves, targets, weights, SETTINGS["everything"])[0].backward()
    for now, then in zip((*leaves, targets, weights), before, strict=True):
        assert torch.equal(now.detach(), then)
