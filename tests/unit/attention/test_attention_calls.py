"""Many short blocks of a forest's mask run as few calls: which, and that values and gradients stay the definition's."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from attending import HEADS, SCALE, dense, heads, values_and_gradients
from forests import forest_of, length_of
from lowpeak.attention.calls import Direct, Together, calls_of
from lowpeak.attention.install import attend_forest
from lowpeak.attention.layout import ForestLayout
from lowpeak.attention.merged import merged_attention

WIDTH = 16
FORESTS = {
    "equal lengths": forest_of(*[(4, (3, 3))] * 6),
    "plain sequences of mixed lengths": forest_of(*[(0, (tokens,)) for tokens in (9, 8, 1, 7, 1, 8, 9, 1, 1)]),
    "prompts of unequal length": forest_of(*[(prompt, (5, 1, 4, 6, 5)) for prompt in (7, 7, 3, 7, 7, 3, 3, 3, 2)]),
    "one-token completions": forest_of(*[(3, (1, 1, 1))] * 5),
    "with padding": forest_of(*[(5, (3, 1, 4, 4)), (5, (2, 4))] * 4, (0, (6,)), padding=5),
    "short beside long": forest_of((600, (3, 4, 4, 5, 540, 3)), *[(6, (530, 4))] * 4, padding=2),
}


def planned(forest, width=64):
    return calls_of(forest.trees, length_of(forest), width, torch.device("cpu"))


def summary(forest, width=64):
    """Each call's number of blocks, and queries of each; a bare number is a block that is run where it is."""
    return [
        (call.num_blocks, len(call.rows) // call.num_blocks) if isinstance(call, Together) else call.size[1]
        for call in planned(forest, width)
    ]


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("name", FORESTS)
def test_values_and_gradients_of_short_blocks_are_the_definitions(name, shape):
    forest = FORESTS[name]
    assert any(isinstance(call, Together) for call in planned(forest, WIDTH * HEADS[shape][0]))
    tensors = heads(forest, *HEADS[shape])
    found = values_and_gradients(lambda q, k, v: merged_attention(q, k, v, forest.trees, SCALE), tensors)
    expected = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_step_of_short_answers_takes_few_calls():
    forest = forest_of(*[(7, (8, 7, 6, 5, 4, 3, 2, 1))] * 32)
    # Prompts come among the completions of their length; towards the prompts each tree is a block.
    assert summary(forest, 128) == [(202, 8), (60, 3), (26, 1), (32, 36)]


@pytest.mark.parametrize(
    ("forest", "width", "expected"),
    [
        (forest_of(*[(0, (9,))] * 3), 64, [9, 9, 9]),
        (forest_of(*[(0, (9,))] * 4), 64, [(4, 9)]),
        (forest_of(*[(0, (64,))] * 4), 128, [(4, 64)]),
        (forest_of(*[(0, (65,))] * 4), 128, [65] * 4),
        (forest_of(*[(0, (64,))] * 4), 512, [64] * 4),
        (forest_of(*[(5, (1, 1))] * 4, *[(4, (1, 1))] * 4), 64, [(10, 5), (14, 1), (4, 2), (4, 2)]),
    ],
)
def test_blocks_come_together_where_they_are_short_and_several(forest, width, expected):
    assert summary(forest, width) == expected


def test_padding_is_at_most_a_quarter_of_a_calls_queries_and_a_call_at_most_4096():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 129, (600,), generator=generator).tolist()
    forest = forest_of(*[(0, (tokens,)) for tokens in lengths])
    together = [call for call in planned(forest) if isinstance(call, Together)]
    assert len(together) > 2
    for call in together:
        padding = 0 if call.padding is None else int(call.padding.sum())
        assert padding <= 0.25 * len(call.rows)
        assert len(call.rows) <= 4096


def test_every_token_has_one_own_block_whatever_comes_together():
    forest = FORESTS["short beside long"]
    places = []
    for call in planned(forest):
        if call.own:
            places += range(call.rows.start, call.rows.stop) if isinstance(call, Direct) else call.rows_into.tolist()
    length = length_of(forest)
    assert sorted(place for place in places if place != length) == list(range(length - 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_of_short_blocks_is_no_worse_than_a_dense_masks(dtype):
    forest = FORESTS["prompts of unequal length"]
    tensors = heads(forest, 6, 2, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    meant = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), exact)
    found = values_and_gradients(lambda q, k, v: merged_attention(q, k, v, forest.trees, SCALE), tensors)
    plain = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), tensors)
    for a, b, c in zip(found, plain, meant, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


def test_short_blocks_values_may_be_narrower_than_queries_and_layers_may_be_checkpointed():
    forest = FORESTS["with padding"]
    tensors = heads(forest, 4, 2, value_width=12)
    layout = ForestLayout(forest, torch.device("cpu"))

    def attend(q, k, v):
        return checkpoint(attend_forest, q, k, v, layout, SCALE, use_reentrant=False)

    found = values_and_gradients(attend, tensors)
    expected = values_and_gradients(lambda q, k, v: dense(q, k, v, forest), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_padding_behind_short_blocks_gets_zeros_and_gives_no_gradient():
    forest = FORESTS["with padding"]
    tensors = heads(forest, 4, 2)
    out, *grads = values_and_gradients(lambda q, k, v: merged_attention(q, k, v, forest.trees, SCALE), tensors)
    assert not out[:, -5:].any()
    assert not any(grad[:, :, -5:].any() for grad in grads)


def test_the_layers_of_a_model_share_their_calls():
    forest = FORESTS["equal lengths"]
    layout = ForestLayout(forest, torch.device("cpu"))
    query = heads(forest, 4, 4)[0]
    assert layout.calls(query) is layout.calls(query)


def test_short_blocks_run_on_tensors_without_numbers():
    forest = FORESTS["with padding"]
    with FakeTensorMode():
        layout = ForestLayout(forest, torch.device("cpu"))
        tensors = [torch.empty(1, h, length_of(forest), WIDTH, requires_grad=True) for h in (6, 2, 2)]
        out = attend_forest(*tensors, layout, SCALE)
        out.sum().backward()
        assert out.shape == (1, length_of(forest), 6, WIDTH)
        assert [x.grad.shape for x in tensors] == [x.shape for x in tensors]
