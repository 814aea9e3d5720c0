"""Kernel launches of a decoded token, counted at two layers."""

from __future__ import annotations

import pytest
from benchmarks import decode_launches as benchmark

PER_LAYER, WITHOUT_LAYERS = 41, 85  # 24 layers: 1,069; 28 layers: 1,233


@pytest.mark.parametrize("shape", benchmark.SHAPES)
def test_a_decoded_token_launches_no_more_than_the_limit_and_copies_no_cache(shape):
    found = {name: benchmark.count_step(shape, benchmark.FILTERS[name], num_layers=2) for name in ("none", "top_p")}
    found |= {kind: benchmark.count_step(shape, {}, num_layers=2, weights=kind) for kind in benchmark.WEIGHTS}
    assert found["none"].total <= 2 * PER_LAYER + WITHOUT_LAYERS, found["none"].launches
    assert found["top_p"].total <= found["none"].total + 1, found["top_p"].launches
    assert "sort" not in found["none"].launches
    num_rows, hidden = 64, benchmark.SHAPES[shape]["hidden_size"]
    assert found["none"].copied_bytes <= 2 * 2 * num_rows * hidden  # attention's output in each layer
    assert found["fp32, copied"].total <= found["none"].total < found["fp32"].total
    assert found["bf16, graph"].total <= 60, found["bf16, graph"].launches
    assert not benchmark.is_within_limits({shape: {name: 1 + limit for name, limit in benchmark.LIMITS[shape].items()}})
