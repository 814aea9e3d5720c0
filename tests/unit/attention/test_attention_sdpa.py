"""Attention over a forest off CUDA: values and gradients equal the reference, in few calls of the kernel."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from forest_cases import forest_of, length_of, random_forest
from lowpeak.attention.install import ForestAttention, attend_forest
from lowpeak.attention.scores import PLAIN, ScoreModifiers
from lowpeak.attention.self_check import dense_attention, forest_mask
from lowpeak.attention.spans import FULL, Span

CPU = torch.device("cpu")
HEADS = {"a key head each": (4, 4), "grouped": (6, 2), "one key head": (4, 1)}
SCALE = 0.3
FORESTS = {
    "one plain sequence": forest_of((0, (9,))),
    "plain sequences of mixed lengths": forest_of(*[(0, (tokens,)) for tokens in (9, 8, 1, 7, 1, 8, 9, 1, 1)]),
    "one prompt": forest_of((5, (3, 1, 4))),
    "a prompt with one completion": forest_of((1, (1,))),
    "equal lengths": forest_of(*[(4, (3, 3))] * 6),
    "prompts of unequal length": forest_of(*[(prompt, (5, 1, 4, 6, 5)) for prompt in (7, 7, 3, 7, 7, 3, 3, 3, 2)]),
    "one-token completions": forest_of(*[(3, (1, 1, 1))] * 5),
    "mixed, with padding": forest_of(*[(5, (3, 1, 4, 4)), (5, (2, 4))] * 4, (0, (6,)), (2, (4, 3)), padding=5),
    "longer than the kernel's blocks": forest_of((70, (600, 33)), (530, (2, 40)), padding=3),
    "short beside long": forest_of((600, (3, 4, 4, 5, 540, 3)), *[(6, (530, 4))] * 2, padding=2),
    "branches": forest_of(
        (9, (6, (4, ((3, (30, 5)), 2)), 15)), (1, ((1, (1, 1)), 1)), (5, (3, 4)), (2, (1, (7, (8, 9)))), padding=2
    ),
    **{f"random tries {seed}": random_forest(seed, 20, 9) for seed in range(4)},
}
PADDED = FORESTS["mixed, with padding"]


def heads(forest, num_heads, num_kv, dtype=torch.float64, width=16, value_width=16):
    """Return query, key and value as a layer makes them: projected together, then transposed."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_heads, width), (num_kv, width), (num_kv, value_width))
    drawn = [torch.randn(1, length_of(forest), *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).transpose(1, 2).detach().requires_grad_() for x in drawn]


def dense(query, key, value, forest, span=FULL, scores=PLAIN):
    """Return attention under the reference mask; zeros for padding."""
    mask = forest_mask(forest, length_of(forest), span=span)
    real = mask.any(1)
    mask = mask | ~real[:, None]
    out = dense_attention([query, key, value], mask, SCALE, scores.softcap, scores.sinks_H)
    return out * real[:, None, None]


def values_and_gradients(attend, tensors):
    out = attend(*tensors)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def fast(forest, kept=False):
    """Return attention as a function of the tensors; with `kept` under activation checkpointing."""
    layout = ForestAttention(forest, CPU)
    if kept:
        return lambda q, k, v: checkpoint(attend_forest, q, k, v, layout, SCALE, use_reentrant=False)
    return lambda q, k, v: attend_forest(q, k, v, layout, SCALE)


def assert_the_definitions(forest, tensors, **how):
    found = values_and_gradients(fast(forest, **how), tensors)
    expected = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("name", FORESTS)
def test_values_and_gradients_are_the_definitions_to_the_last_digits(name, shape):
    assert_the_definitions(FORESTS[name], heads(FORESTS[name], *HEADS[shape]))


SPANS = [Span(1), Span(2), Span(5), Span(64), Span(700), Span(4, is_chunk=True), Span(100, is_chunk=True)]


@pytest.mark.parametrize("kind", ["plain", "capped", "with sinks"])
@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize(
    "name", ["mixed, with padding", "longer than the kernel's blocks", "short beside long", "branches"]
)
def test_windows_chunks_caps_and_sinks_are_the_definitions_too(name, span, kind):
    forest = FORESTS[name]
    tensors = heads(forest, 6, 2)
    sinks = torch.linspace(-1, 1, 6, dtype=torch.float64, requires_grad=True)
    tensors += [sinks] if kind == "with sinks" else []

    def attend_with(attend):
        def run(query, key, value, sinks=None):
            return attend(query, key, value, ScoreModifiers(1.5 if kind == "capped" else None, sinks))

        return run

    layout = ForestAttention(forest, CPU)
    found = values_and_gradients(
        attend_with(lambda q, k, v, s: attend_forest(q, k, v, layout, SCALE, span, s)), tensors
    )
    expected = values_and_gradients(attend_with(lambda q, k, v, s: dense(q, k, v, forest, span, s)), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_window_computes_few_scores_more_than_it_has():
    forest = forest_of((1000, (10,)), (0, (2000,)))
    layout, query = ForestAttention(forest, CPU), heads(forest, 4, 4)[0]
    calls = layout.sdpa_calls(query, Span(100)).calls
    assert sum(len(c.queries) * len(c.keys) // c.num_segments for c in calls) <= 2.2 * 100 * length_of(forest)


@pytest.mark.parametrize("shape", [(4, 4), (4, 2)])
def test_values_may_be_narrower_than_queries_and_layers_may_be_checkpointed(shape):
    assert_the_definitions(PADDED, heads(PADDED, *shape, value_width=12), kept=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["prompts of unequal length", "longer than the kernel's blocks"])
def test_rounding_is_no_worse_than_a_dense_masks(name, dtype):
    forest = FORESTS[name]
    tensors = heads(forest, 6, 2, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    meant = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), exact)
    found = values_and_gradients(fast(forest), tensors)
    plain = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), tensors)
    for a, b, c in zip(found, plain, meant, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


def test_the_mask_says_who_sees_whom():
    rows = ["1000000", "1100000", "1110000", "1111000", "1110100", "1100010", "0000000"]
    mask = forest_mask(forest_of((2, ((1, (1, 1)), 1)), padding=1), 7)
    assert ["".join(str(int(x)) for x in row) for row in mask] == rows


def test_what_another_completion_says_changes_no_bit():
    forest = forest_of((4, (3, 3)), (0, (5,)))
    tensors = heads(forest, 4, 2, torch.float32)
    before = fast(forest)(*tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor[:, :, 7:10] += 1
    after = fast(forest)(*tensors)
    others = [*range(7), *range(10, 15)]
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, 7:10], after[:, 7:10])


def summary(forest):
    """Return each call's number of segments, of queries and of keys per segment."""
    layout, query = ForestAttention(forest, CPU), heads(forest, 4, 4)[0]
    assert layout.sdpa_calls(query) is layout.sdpa_calls(query)
    each = layout.sdpa_calls(query).calls
    return [(c.num_segments, len(c.queries) // c.num_segments, len(c.keys) // c.num_segments) for c in each]


@pytest.mark.parametrize(
    ("forest", "expected"),
    [
        (
            forest_of(*[(7, (8, 7, 6, 5, 4, 3, 2, 1))] * 32),
            [(86, 15, 15), (10, 7, 7), (103, 6, 13), (60, 3, 10), (29, 1, 8)],
        ),
        (forest_of((64, (200, 64, 63, 1))), [(1, 264, 264), (1, 128, 128), (1, 64, 64), (1, 63, 127), (1, 1, 65)]),
        (forest_of(*[(0, (2100,))] * 2), [(1, 2100, 2100)] * 2),
        (forest_of(*[(0, (2048,))] * 2), [(2, 2048, 2048)]),
    ],
    ids=["short answers", "a mask only below the prompt's length", "too long for one call", "just short enough"],
)
def test_segments_of_similar_size_are_one_call(forest, expected):
    assert summary(forest) == expected


def test_padding_is_at_most_a_quarter_of_a_calls_scores_and_a_call_at_most_4096_keys():
    lengths = torch.randint(1, 129, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    calls = summary(forest_of(*[(0, (tokens,)) for tokens in lengths]))
    assert 2 < len(calls) < 60
    assert all(number * columns <= 4096 for number, _, columns in calls)
    assert sum(length**2 for length in lengths) >= 0.75 * sum(
        number * rows * columns for number, rows, columns in calls
    )


@pytest.mark.parametrize("on_cuda", [False, True])
def test_it_runs_on_tensors_without_numbers(on_cuda):
    with FakeTensorMode():
        layout = ForestAttention(PADDED, CPU)
        layout.is_on_cuda = on_cuda
        tensors = [torch.empty(1, h, length_of(PADDED), 16, requires_grad=True) for h in (6, 2, 2)]
        out = attend_forest(*tensors, layout, SCALE)
        out.sum().backward()
        assert out.shape == (1, length_of(PADDED), 6, 16)
        assert [x.grad.shape for x in tensors] == [x.shape for x in tensors]
