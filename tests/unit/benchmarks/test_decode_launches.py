"""Kernel launches of a decoded token, counted at two layers."""

from __future__ import annotations

import pytest
from benchmarks import decode_launches as benchmark

PER_LAYER, WITHOUT_LAYERS = 41, 103  # 24 layers: 1,087; 28 layers: 1,251


@pytest.mark.parametrize("shape", benchmark.SHAPES)
def test_a_decoded_token_launches_no_more_than_the_limit_and_copies_no_cache(shape):
    found = {name: benchmark.count_step(shape, benchmark.FILTERS[name], num_layers=2) for name in ("none", "top_p")}
    assert found["none"].total <= 2 * PER_LAYER + WITHOUT_LAYERS, found["none"].launches
    assert found["top_p"].total <= found["none"].total + benchmark.EXTRA_OF_TOP_P, found["top_p"].launches
    assert "sort" not in found["none"].launches
    num_rows, hidden = 64, benchmark.SHAPES[shape]["hidden_size"]
    assert found["none"].copied_bytes <= 2 * 2 * num_rows * hidden  # attention's output in each layer
    assert not benchmark.is_within_limits(
        {shape: {"none": benchmark.LIMITS[shape], "top_p": benchmark.LIMITS[shape] + 7}}
    )
