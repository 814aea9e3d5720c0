"""FlexAttention's block mask and its uncompiled forward equal the reference."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from forest_cases import forest_of, length_of, random_forest
from lowpeak.attention.flex import BLOCK, attend_flex, block_mask, kernel_options
from lowpeak.attention.scores import PLAIN, ScoreModifiers
from lowpeak.attention.self_check import dense_attention, forest_mask
from lowpeak.attention.spans import FULL, Span
from rounding import assert_close_to_largest

FORESTS = {
    "less than a block": forest_of((5, (3, 1, 4)), (0, (6,)), padding=2),
    "several blocks": forest_of((5, (3, 1)), (0, (6,)), (300, (600, 33, 200)), (1, (1,))),
    "whole blocks, then padding": forest_of((256, (128, 128)), (0, (128,)), padding=140),
    "branches": forest_of(
        (100, (60, (40, ((30, (300, 5)), 20)), 150)), (1, ((1, (1, 1)), 1)), (256, ((128, (128, 256)), 128))
    ),
    "random tries": random_forest(0, 30, 60),
    "plain sequences": forest_of((0, (200,)), (0, (300,)), (0, (12,))),
}
CPU = torch.device("cpu")


SPANS = [FULL, Span(2), Span(130), Span(4, is_chunk=True), Span(256, is_chunk=True)]


CASES = [(name, span, PLAIN) for name in FORESTS for span in SPANS]
CASES += [("less than a block", SPANS[1], ScoreModifiers(softcap=1.5))]
CASES += [("less than a block", SPANS[1], ScoreModifiers(sinks_H=torch.linspace(-1, 1, 6)))]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "span", "scores"), CASES, ids=str)
def test_the_forward_is_the_definitions(name, span, scores):
    forest = FORESTS[name]
    length = length_of(forest)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, length, w) for h, w in ((6, 16), (2, 16), (2, 12)))
    out = attend_flex(query, key, value, block_mask(forest.nodes, length, CPU, span), 0.3, scores, compiled=False)
    mask = forest_mask(forest, length, span=span)
    real = mask.any(1)
    mask = mask | ~real[:, None]
    meant = dense_attention([query, key, value], mask, 0.3, scores.softcap, scores.sinks_H)
    assert_close_to_largest(out[:, real], meant[:, real], 3e-6)
    assert out.isfinite().all()


@pytest.mark.parametrize(("span", "full_share"), [(FULL, 0.7), (Span(300), 0.0), (Span(256, is_chunk=True), 0.0)])
@pytest.mark.parametrize("name", FORESTS)
def test_blocks_hold_every_pair_that_sees_and_few_that_do_not_and_full_ones_are(name, span, full_share):
    forest = FORESTS[name]
    length = length_of(forest)
    mask, ours = forest_mask(forest, length, span=span), block_mask(forest.nodes, length, CPU, span)
    meant = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, length, length, device="cpu")
    ours_NN, meant_NN = ours.to_dense()[0, 0].bool(), meant.to_dense()[0, 0].bool()
    assert (ours_NN | ~meant_NN).all()
    assert (ours_NN & ~meant_NN).sum() <= len(ours_NN)  # padding sees its own block, so that no row of scores is empty
    assert ours.full_kv_num_blocks.sum() >= full_share * meant.full_kv_num_blocks.sum()
    for row, count in enumerate(ours.full_kv_num_blocks[0, 0].tolist()):
        for column in ours.full_kv_indices[0, 0, row, :count].tolist():
            rows, columns = (slice(128 * x, 128 * (x + 1)) for x in (row, column))
            real = mask[rows].any(1)
            assert mask[rows, columns][real].all()


def test_a_block_mask_is_built_of_tensors_without_numbers_too():
    forest = FORESTS["several blocks"]
    with FakeTensorMode():
        mask = block_mask(forest.nodes, length_of(forest), CPU)
    assert mask.shape == (1, 1, length_of(forest), length_of(forest))


SHARED_MEMORY = {"A100": 166_912, "H100": 232_448, "RTX 3090 to 5090": 101_376}


@pytest.mark.parametrize("gpu", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
def test_chosen_block_sizes_divide_a_block_of_the_mask_and_fit_shared_memory(gpu, dtype, width):
    options = kernel_options(dtype, width, SHARED_MEMORY[gpu])
    sizes = {name: value for name, value in options.items() if "BLOCK" in name}
    is_small = SHARED_MEMORY[gpu] < SHARED_MEMORY["A100"]
    assert bool(sizes) == (dtype == torch.float32 or (is_small and width > 128))  # else torch's own fit
    if not sizes:
        return
    assert all(BLOCK % size == 0 for size in sizes.values())
    # The kernels require it.
    assert sizes["bwd_BLOCK_N1"] % sizes["bwd_BLOCK_M1"] == 0 == sizes["bwd_BLOCK_M2"] % sizes["bwd_BLOCK_N2"]
    row = (1 << (width - 1).bit_length()) * dtype.itemsize
    # At most: queries and two stages of keys and values; keys, values and two stages of queries and gradients.
    forward = (sizes["fwd_BLOCK_M"] + 4 * sizes["fwd_BLOCK_N"]) * row
    backward = (2 * sizes["bwd_BLOCK_N1"] + 4 * sizes["bwd_BLOCK_M1"]) * row
    assert max(forward, backward) <= SHARED_MEMORY[gpu]


def test_sizes_are_torchs_own_on_rocm():
    assert not [name for name in kernel_options(torch.float32, 128, None) if name.startswith(("fwd", "bwd"))]
