"""Hidden states on their way into a head, of log-probs or of scores: where they are read, and the product in fp32.

Shapes: B rows of L positions, T of the flattened positions, D hidden, V what the head gives.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowpeak.logprobs.chunked import no_autocast
from lowpeak.logprobs.few_rows import linear


def at_positions(hidden_BLD: Tensor, positions_T: Tensor) -> Tensor:
    """`hidden.reshape(B * L, D)[positions]`: [T, D]. Prompt and padding positions are left behind here.

    A shared prompt's last position comes once for each completion. On CUDA indexing adds their gradients up in one order,
    `index_select` in any; on CPUs both do, and the second is faster.
    """
    hidden_ND = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
    return hidden_ND[positions_T] if hidden_ND.is_cuda else hidden_ND.index_select(0, positions_T)


def fp32_product(module: Any, hidden: Tensor) -> Tensor:
    """A linear head's `hidden @ weight.T + bias` in fp32, whatever computes around it: [..., D] -> [..., V]."""
    with no_autocast(hidden.device):
        bias = None if module.bias is None else module.bias.float()
        return linear(hidden.float(), module.weight.float(), bias)
