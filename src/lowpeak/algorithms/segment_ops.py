"""Rows: sums and means over each row's counted tokens, as segment sums that never wait for the device.

Shapes: T counted tokens of a micro-batch, B of its rows, U of its pairs. A row without counted tokens gives 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak.records import TokenBatch


def row_sums(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """`sum(values_T[rows_T == b])` for each row b: [B]."""
    return values_T.new_zeros(tokens.num_rows).index_add(0, tokens.rows_T, values_T)


def row_means(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """`mean(values_T[rows_T == b])` for each row b: [B]."""
    return row_sums(values_T, tokens) / row_sums(torch.ones_like(values_T), tokens).clamp(min=1.0)


def row_values(values_T: Tensor, tokens: TokenBatch) -> Tensor:
    """The value that all tokens of a row share: [B], without the rounding of a mean."""
    return values_T.new_zeros(tokens.num_rows).scatter(0, tokens.rows_T, values_T)


def over_tokens(values_B: Tensor, tokens: TokenBatch) -> Tensor:
    """Each row's value at each of its tokens: [T]."""
    return values_B.index_select(0, tokens.rows_T)


def pair_sums(values_B: Tensor, tokens: TokenBatch) -> Tensor:
    """`sum(values_B[pairs_B == u])` for each pair u: [U]."""
    assert tokens.pairs_B is not None, "the unit is a pair"
    return values_B.new_zeros(len(tokens.weights_U)).index_add(0, tokens.pairs_B, values_B)
