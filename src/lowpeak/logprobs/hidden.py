"""Hidden states on their way into a head, of log-probs or of scores: where they are read, and the head's own products.

Shapes: B rows of L positions, T of the flattened positions, D hidden, V what the head gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.logprobs.chunked import no_autocast

_NUM_ROWS = range(3, 65)  # where oneDNN is the quicker of the two
_LARGE = 1 << 26  # bytes of a head that is read from memory each time


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


def linear(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """`nn.functional.linear(hidden, weight, bias)`: logits [..., V] of hidden states [..., D], the same to fp32's rounding.

    A few rows of fp32 without gradients before a large head on a CPU, as generation asks for, go through oneDNN. MKL reads a
    head that its caches do not hold once for every three rows or so below 16, oneDNN once for all. No public call of torch
    reaches oneDNN's fp32 product, so it is its compiler's private operator, where there is one. One thread, a head of
    151,936 x 512, milliseconds:

        rows                   2      4      8     15     16     32     64
        nn.functional.linear   25     51     81    138    61     74     81
        oneDNN                 31     36     39     48     46     54     80
    """
    if _is_quicker(hidden, weight_VD):
        return torch.ops.mkldnn._linear_pointwise(hidden, weight_VD, bias_V, "none", [], "")
    return nn.functional.linear(hidden, weight_VD, bias_V)


def _is_quicker(hidden: Tensor, weight_VD: Tensor) -> bool:
    """Whether torch would compute this product in fp32, and oneDNN is quicker at it."""
    return (
        weight_VD.device.type == "cpu"
        and weight_VD.dtype == hidden.dtype == torch.float32
        and weight_VD.numel() * weight_VD.itemsize >= _LARGE
        and hidden.numel() // hidden.shape[-1] in _NUM_ROWS
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
