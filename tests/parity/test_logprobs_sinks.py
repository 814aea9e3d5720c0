"""Gradients that heads and embeddings deliver to a gradient sink, beside autograd of the naive definition."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from test_logprobs_chunked import SETTINGS, inputs, naive_loss, per_token, recomputed, visited
from test_logprobs_direct import PADDING, rows, run
from test_logprobs_memory import peak_bytes
from torch._subclasses.fake_tensor import FakeTensorMode

from lowpeak.heads.lm_head import install_head
from lowpeak.logprobs.chunked import fused_loss
from lowpeak.logprobs.inplace_grad import allows_inplace_grad, gradient_sink
from lowpeak.logprobs.reference import ChunkSettings, HeadScale, naive_logprobs
from rounding import assert_close_to_largest, assert_each_close_to_largest
from summed_gradient import CountedRows, SummedGradient
from tiny_models import tiny_model

NUM_IDS = 601  # three stripes, the last of them short
SCALE = 0.25
FULL = ChunkSettings(4, 0.7, HeadScale(0.8, 1.5), entropy=True, entropy_grad=True)
SHAPES = [(0, NUM_IDS), (1, NUM_IDS), (9, 1), (7, 256), (3, 257)]
MANY_TOKENS = (replace(FULL, chunk_size=96), (1300, NUM_IDS), True)


def leaf_copies(leaves, dtypes=(torch.float64,) * 3):
    pairs = zip(leaves, dtypes, strict=True)
    return [None if leaf is None else leaf.detach().to(dtype, copy=True).requires_grad_() for leaf, dtype in pairs]


def assert_naive_gradients(way, leaves, exact, targets, weights, settings, bounds, values_bound):
    """Two micro-batches into a sink give the definition's values and twice its gradients, each within its bound."""
    sink = SummedGradient(leaves[1])
    expected = naive_loss(exact, targets, weights, settings)
    (2 * SCALE * expected[0]).backward()
    for _ in range(2):
        found = way(leaves, targets, weights, replace(settings, inplace_grad_scale=SCALE))
        (SCALE * found[0]).backward()
    for ours, definition in zip(found, expected, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours.double(), definition, rtol=values_bound, atol=values_bound)
    assert sink.each_row_once(times=2)
    assert (sink.accumulated, leaves[1].grad) == (0, None)
    gradients = [leaves[0].grad, sink.total, None if leaves[2] is None else leaves[2].grad]
    for ours, leaf, bound in zip(gradients, exact, bounds, strict=True):
        if leaf is not None and leaf.numel():
            assert_close_to_largest(ours.double(), leaf.grad, bound)


@pytest.mark.parametrize("way", [recomputed, visited])
@pytest.mark.parametrize(
    ("settings", "sizes", "bias"),
    [(settings, (11, NUM_IDS), bias) for settings in SETTINGS.values() for bias in (True, False)]
    + [(FULL, sizes, True) for sizes in SHAPES]
    + [MANY_TOKENS],
    ids=[f"{name}-{bias}" for name in SETTINGS for bias in ("bias", "no bias")] + [*map(str, SHAPES), "many tokens"],
)
def test_a_sink_gets_the_definitions_gradient_of_each_row(way, settings, sizes, bias):
    leaves, targets, weights = inputs(*sizes, bias=bias)
    assert_naive_gradients(way, leaves, leaf_copies(leaves), targets, weights, settings, (1e-11,) * 3, 1e-11)


DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "bf16 states": (torch.bfloat16, torch.float32),
    "bf16 head": (torch.float32, torch.bfloat16),
}
ROUNDED_TWICE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("way", [recomputed, visited])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("settings", [SETTINGS["plain"], FULL], ids=["plain", "full"])
def test_in_each_dtype_rows_are_summed_in_fp32_over_all_tokens(way, dtypes, settings):
    """The hidden states' gradient is rounded once in a micro-batch, and once more where two are added."""
    hidden_dtype, head_dtype = dtypes
    leaves, targets, weights = inputs(150, NUM_IDS)
    leaves = leaf_copies(leaves, (hidden_dtype, head_dtype, torch.float32))
    exact = leaf_copies(leaves)
    # The head is rounded to the hidden states' dtype.
    exact[1].data.copy_(leaves[1].to(hidden_dtype))
    bounds = (ROUNDED_TWICE[hidden_dtype], 1e-6, 1e-6)
    assert_naive_gradients(way, leaves, exact, targets, weights, settings, bounds, 1e-5)


@pytest.mark.parametrize("way", [recomputed, visited])
def test_under_autocast_the_rows_are_those_of_the_rounded_head(way):
    leaves, targets, weights = inputs(11, NUM_IDS, dtype=torch.float32, bias=False)
    exact = leaf_copies([x if x is None else x.bfloat16() for x in leaves])
    naive_loss(exact, targets, weights, FULL)[0].backward()
    sink = SummedGradient(leaves[1])
    with torch.autocast("cpu", torch.bfloat16):
        loss = way(leaves, targets, weights, replace(FULL, inplace_grad_scale=1.0))[0]
    loss.backward()
    assert sink.each_row_once(times=1)
    assert_close_to_largest(sink.total, exact[1].grad, 1e-6)
    assert_close_to_largest(leaves[0].grad.double(), exact[0].grad, 2**-8)


@pytest.mark.parametrize("way", [recomputed, visited])
def test_top_1_flags_come_with_a_sink_as_without(way):
    leaves, targets, weights = inputs(num_ids=5)
    targets[::2] = torch.nn.functional.linear(*leaves)[::2].argmax(-1)
    found = []
    for sink in (False, True):
        if sink:
            SummedGradient(leaves[1])
        flags = torch.empty(len(targets), dtype=torch.bool)
        way(leaves, targets, weights, replace(FULL, inplace_grad_scale=1.0, is_top1_T=flags))
        found.append(flags)
    assert torch.equal(*found)
    assert found[0][::2].all()


@pytest.mark.parametrize("has_sink", [True, False])
def test_a_chunk_whose_loss_is_constant_adds_its_value_and_no_gradient(has_sink):
    """Chunks of other derivatives stand beside it: by log-probs alone, and by both."""

    def loss(weights, logprobs, entropy, start, stop):
        if start == FULL.chunk_size:
            return logprobs.new_tensor(7.0)
        return per_token(weights, logprobs, entropy if start == 0 else None, start, stop)

    leaves, targets, weights = inputs(11, NUM_IDS)
    exact, sink = leaf_copies(leaves), SummedGradient(leaves[1]) if has_sink else None
    logprobs, entropy = naive_logprobs(*exact, targets, FULL.temperature, FULL.scale)
    expected = sum(loss(weights, logprobs[a:b], entropy[a:b], a, b) for a, b in FULL.spans(11))
    expected.backward()
    settings = replace(FULL, inplace_grad_scale=1.0 if has_sink else None)
    found = fused_loss(*leaves, targets, functools.partial(loss, weights), settings)[0]
    torch.testing.assert_close(found, expected)
    found.backward()
    by_head = sink.total if has_sink else leaves[1].grad
    for ours, leaf in zip((leaves[0].grad, by_head, leaves[2].grad), exact, strict=True):
        torch.testing.assert_close(ours, leaf.grad)


batch = functools.partial(rows, num_ids=NUM_IDS)


def twins(dtype=torch.float64, **shape):
    """A model whose head and embeddings have sinks, those by name, and a copy without."""
    ours = install_head(tiny_model(NUM_IDS, dtype=dtype, **shape)).train()
    theirs, weights = copy.deepcopy(ours), dict(ours.named_parameters())
    tables = [name for name in weights if name.startswith(("model.embed_tokens", "lm_head"))]
    return ours, {name: SummedGradient(weights[name]) for name in tables}, theirs


def assert_same_sums(ours, sinks, theirs, bound):
    found = {name: p.grad if name not in sinks else sinks[name].total for name, p in ours.named_parameters()}
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert all(p.grad is None for p in ours.parameters() if gradient_sink(p) is not None)
    assert_each_close_to_largest(
        {n: g.double() for n, g in found.items()}, {n: g.double() for n, g in expected.items()}, bound
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("visits", [True, False], ids=["visited", "recomputed"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.04)], ids=str
)
def test_a_models_micro_batches_sum_in_its_sinks_as_in_autograd(tied, visits, dtype, bound):
    ours, sinks, theirs = twins(dtype, tied=tied)
    for number in range(3):
        losses = [
            run(model, batch(number), promised, visits=visits, scale=SCALE)
            for model, promised in ((ours, SCALE), (theirs, None))
        ]
        torch.testing.assert_close(*losses)
    assert_same_sums(ours, sinks, theirs, bound)
    head, table = sinks.get("lm_head.weight", sinks["model.embed_tokens.weight"]), sinks["model.embed_tokens.weight"]
    assert head.each_row_once(times=3)
    assert len(head.rows) == 9
    assert len(table.selected) == 3 * 18
    assert {sink.accumulated for sink in sinks.values()} == {0}
    if not tied:
        assert not table.total[PADDING].any()


@pytest.mark.parametrize("visits", [True, False], ids=["visited", "recomputed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("promised", [SCALE, None], ids=["hooked", "not promised"])
def test_what_autograd_must_accumulate_reaches_the_sink_once_by_its_hook(visits, tied, promised):
    ours, sinks, theirs = twins(tied=tied)
    if promised is not None:
        for model in (ours, theirs):
            for table in {model.lm_head.weight, model.model.embed_tokens.weight}:
                table.register_hook(lambda gradient: 3 * gradient)
                assert not allows_inplace_grad(table)
    for number in range(2):
        run(ours, batch(number), promised, visits=visits, scale=SCALE)
        run(theirs, batch(number), None, visits=visits, scale=SCALE)
    assert_same_sums(ours, sinks, theirs, 1e-11)
    assert {(sink.accumulated, len(sink.rows), len(sink.selected)) for sink in sinks.values()} == {(2, 0, 0)}


def test_a_second_hook_after_accumulation_sees_each_gradient():
    ours, sinks, _ = twins(tied=False)
    seen = []
    ours.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    run(ours, batch(0), 1.0, visits=True)
    assert len(seen) == sinks["lm_head.weight"].accumulated == 1
    assert sinks["lm_head.weight"].rows == []


@pytest.mark.parametrize(
    ("way", "dtype", "num_tokens"),
    [
        (recomputed, torch.float32, 4608),
        (visited, torch.bfloat16, 4608),
        (recomputed, torch.bfloat16, 40),
        (visited, torch.float32, 40),
    ],
)
def test_no_matrix_of_the_heads_size_exists_in_a_7b_models_head(way, dtype, num_tokens):
    num_ids, width = 152_064, 3_584
    with FakeTensorMode():
        hidden, weight = (torch.empty(rows, width, dtype=dtype, requires_grad=True) for rows in (num_tokens, num_ids))
        targets, weights = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)
        sink, settings = CountedRows(weight), replace(FULL, chunk_size=256, inplace_grad_scale=1.0)
        peak = peak_bytes(lambda: way([hidden, weight, None], targets, weights, settings)[0].backward())
    assert sink.num_rows == num_ids
    buffer = 4 * min(num_tokens, 256) * num_ids
    given = hidden.nbytes + weight.nbytes  # views of them are results, too
    states = 4 * 4 * num_tokens * width  # a sum in fp32, the states widened, and two gradients at most
    assert peak - given < 2.5 * buffer + states + (40 << 20)
    assert peak - given < (weight.nbytes if dtype == torch.bfloat16 else weight.nbytes / 2)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("visits", [True, False], ids=["visited", "recomputed"])
def test_no_matrix_of_the_tables_size_exists_in_a_models_backward(tied, visits):
    num_ids, width = 20_021, 256
    model = install_head(tiny_model(num_ids, tied=tied, hidden=width)).train()
    tables = {model.lm_head.weight, model.model.embed_tokens.weight}
    sinks = [CountedRows(table) for table in tables]
    run(model, batch(0), 1.0, visits=visits)
    peak = peak_bytes(lambda: run(model, batch(0), 1.0, visits=visits))
    assert sum(sink.num_rows for sink in sinks) == 2 * num_ids
    assert sum(sink.num_selected for sink in sinks) == 2 * 18
    size = sum(parameter.nbytes for parameter in model.parameters())
    others = size - sum(table.nbytes for table in tables)
    assert peak - size < 2 * others + model.lm_head.weight.nbytes / 4
